"""Canonical names: what wrappers put in front of them is taken off again, by a declared rule.

`_orig_mod.` (torch.compile), `_fsdp_wrapped_module.` and `_checkpoint_wrapped_module.` go wherever
they stand; `module.` (DataParallel and its kin) goes if every name begins with it. Any other prefix
is part of the name: where one appears or disappears between versions, the layout has changed.
"""

from collections.abc import Mapping
from typing import Final, TypeVar

from plait.errors import LayoutInvalid

_WRAPPERS: Final = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_PARALLEL: Final = "module."

T = TypeVar("T")


def canonical_names(state: Mapping[str, T]) -> dict[str, T]:
    """The same values under their canonical names, in the same order.

    Raises:
        LayoutInvalid: two names become one.
    """
    renamed: dict[str, T] = {}
    origins: dict[str, str] = {}
    names = list(map(_unwrapped, state))
    while names and all(name.startswith(_PARALLEL) for name in names):
        names = [name.removeprefix(_PARALLEL) for name in names]
    for origin, name in zip(state, names, strict=True):
        if name in renamed:
            raise LayoutInvalid(
                f"tensors {origins[name]!r} and {origin!r} have one canonical name, {name!r}"
            )
        renamed[name], origins[name] = state[origin], origin
    return renamed


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
