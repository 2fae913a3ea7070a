"""The parallel grain: cuts whose frames belong to one slot each, so that a rank needs only its own.

Slot 0 is common: norms, routers, scalars, whatever has no known parallel side. Slots 1 to `grain`
are equal shares of the rest, cut as tensor- and expert-parallel engines cut it: so one cut serves
every degree of parallelism that divides the grain. Which rank needs what is never decided here: an
engine reads its own map (docs/format.md, section 4). A wrong role costs bytes, not correctness.
"""

from plait.grain.roles import (
    COLUMNS,
    DEFAULT_RULES,
    DENSE_RULES,
    EXPERT_RULES,
    EXPERTS,
    KEY_VALUE,
    ROWS,
    VOCABULARY,
    Role,
    Rules,
    kv_heads_of,
)
from plait.grain.shares import COMMON
from plait.grain.slots import chunks_in_slots, slots_of
from plait.grain.slotted import GRAIN_MAX, Grain, SlottedCut, grain_cut

__all__ = [
    "COLUMNS",
    "COMMON",
    "DEFAULT_RULES",
    "DENSE_RULES",
    "EXPERTS",
    "EXPERT_RULES",
    "GRAIN_MAX",
    "KEY_VALUE",
    "ROWS",
    "VOCABULARY",
    "Grain",
    "Role",
    "Rules",
    "SlottedCut",
    "chunks_in_slots",
    "grain_cut",
    "kv_heads_of",
    "slots_of",
]
