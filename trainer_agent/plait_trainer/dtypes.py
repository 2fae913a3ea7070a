"""The published dtype of each tensor."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch

from plait.errors import UsageError
from plait.tensors import DTYPES
from plait_trainer.options import check_mapping

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
        UsageError: not a mapping, an unknown dtype name, or a default that isn't floating-point.
    """

    default: str | None = "BF16"
    overrides: Mapping[str, str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_mapping(self.overrides, "dtypes")
        for name in (self.default, *self.overrides.values()):
            if name is not None and str(name) not in DTYPES:
                raise UsageError(
                    f"unknown dtype {name!r} to publish in; expected None or one of "
                    f"{', '.join(DTYPES)}"
                )
        if self.default is not None and not DTYPES[self.default].is_floating_point:
            raise UsageError(
                f"weights can't be rounded to {self.default}; expected a floating-point dtype"
            )

    def published(self, name: str, tensor: torch.Tensor, *, kept: bool) -> torch.dtype:
        """The dtype that the tensor is published in.

        Args:
            kept: not a weight that the optimizer rounds at will (a buffer; a parameter that its
                model keeps in FP32): only an override casts it.
        Raises:
            UsageError: an override that is no rounding: from or to something else than floats.
        """
        for pattern, override in self.overrides.items():
            if fnmatchcase(name, pattern):
                return self._overridden(name, tensor.dtype, override)
        if self.default is None or kept or tensor.dtype not in _CASTABLE:
            return tensor.dtype
        return DTYPES[self.default]

    def unmatched(self, names: Collection[str]) -> list[str]:
        """Patterns that fit none of these names."""
        return [
            pattern for pattern in self.overrides
            if not any(fnmatchcase(name, pattern) for name in names)
        ]  # fmt: skip

    @staticmethod
    def _overridden(name: str, found: torch.dtype, override: str | None) -> torch.dtype:
        if override is None or DTYPES[override] == found:
            return found
        wanted = DTYPES[override]
        if not (found.is_floating_point and wanted.is_floating_point):
            raise UsageError(
                f"{name!r} is {found} and can't be rounded to {override}",
                remedy="dtypes names floating-point dtypes, for floating-point tensors",
            )
        return wanted
