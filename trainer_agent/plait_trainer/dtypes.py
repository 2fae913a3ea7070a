"""The published dtype of each tensor."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch

from plait.errors import UsageError
from plait.tensors import DTYPES

# What a training framework keeps wide and an engine serves narrow. One-byte floats come with scales
# that belong to their very bits, and are never cast by default.
_CASTABLE = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


@dataclass(frozen=True)
class DtypeRule:
    """Which dtype a tensor is published in.

    Attributes:
        default: for floating-point parameters; None publishes every tensor as it is.
        overrides: name pattern (as in fnmatch) → dtype, or None for as it is; the first match wins.

    Raises:
        UsageError: an unknown dtype name.
    """

    default: str | None = "BF16"
    overrides: Mapping[str, str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (self.default, *self.overrides.values()):
            if name is not None and name not in DTYPES:
                raise UsageError(
                    f"unknown dtype {name!r} to publish in; expected None or one of "
                    f"{', '.join(DTYPES)}"
                )

    def published(self, name: str, tensor: torch.Tensor, *, kept: bool) -> torch.dtype:
        """The dtype that the tensor is published in.

        Args:
            kept: not a weight that the optimizer rounds at will (a buffer; a parameter that its
                model keeps in FP32): only an override casts it.
        """
        for pattern, override in self.overrides.items():
            if fnmatchcase(name, pattern):
                return tensor.dtype if override is None else DTYPES[override]
        if self.default is None or kept or tensor.dtype not in _CASTABLE:
            return tensor.dtype
        return DTYPES[self.default]
