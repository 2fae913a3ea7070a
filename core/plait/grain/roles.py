"""Roles: how engines divide tensors among their ranks, by the names that models give these."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal


@dataclass(frozen=True, slots=True)
class Role:
    """How engines divide a tensor among their ranks.

    Attributes:
        kind: `rows` along the first side, `columns` along the second one of two, `experts` whole
            by the number that its name carries, `common` not at all.
        parts: tensors stacked along the rows, each divided by itself (gate on up).
        padding: engines divide the rows as if they were filled up to a multiple of this.
        key_value: rows are key-value heads, which engines repeat where ranks outnumber them.
    """

    kind: Literal["rows", "columns", "experts", "common"]
    parts: int = 1
    padding: int = 1
    key_value: bool = False


ROWS: Final = Role("rows")
COLUMNS: Final = Role("columns")
EXPERTS: Final = Role("experts")
KEY_VALUE: Final = Role("rows", key_value=True)
VOCABULARY: Final = Role("rows", padding=64)

Rules = Sequence[tuple[str, Role]]

_PARAMETER: Final = r"\.(weight|bias|weight_scale|weight_scale_inv)"

# Whole experts: for engines whose ranks hold whole experts. One that divides every expert among its
# ranks is served by DENSE_RULES alone, at a longer cut.
EXPERT_RULES: Final[Rules] = (
    (r"(?P<group>.*\bexperts)\.(?P<number>\d+)\..*", EXPERTS),
    (r".*\bexperts\.(gate_up_proj|gate_proj|up_proj|down_proj|w1|w2|w3)(_bias)?", ROWS),
)
DENSE_RULES: Final[Rules] = (
    (rf".*\b(k_proj|v_proj){_PARAMETER}", KEY_VALUE),
    (rf".*\b(gate_up_proj){_PARAMETER}", Role("rows", parts=2)),
    (rf".*\b(q_proj|q_b_proj|kv_b_proj|gate_proj|up_proj|w1|w3|fc1){_PARAMETER}", ROWS),
    (rf".*\b(o_proj|out_proj|down_proj|w2|fc2){_PARAMETER}", COLUMNS),
    (r".*\b(embed_tokens|lm_head)\.(weight|bias)", VOCABULARY),
)
DEFAULT_RULES: Final[Rules] = (*EXPERT_RULES, *DENSE_RULES)


def kv_heads_of(config: Mapping[str, Any]) -> int | None:
    """Key-value heads that a Hugging Face `config.json` states, of the text model if nested.

    None where it states none, or no number from 1 up.
    """
    inner = config.get("text_config")
    for fields in (config, inner if isinstance(inner, Mapping) else {}):
        for name in ("num_key_value_heads", "num_attention_heads"):
            heads = fields.get(name)
            if type(heads) is int and heads > 0:
                return heads
    return None
