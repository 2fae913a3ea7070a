"""What a `transformers` model says about its own checkpoint: ties, omissions, split experts.

A module's names and shapes are not always those on disk: transformers keeps a mixture's experts
stacked in one parameter and writes one tensor per expert. The model's own conversion is run once on
element numbers instead of weights; what comes out tells which strided view of the parameter each
written tensor is, and such a view costs nothing at every publish.
"""

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from plait.errors import PublishError


@dataclass(frozen=True)
class View:
    """A written tensor as a view of a parameter's elements, counted row-major."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        """One behind the last of the elements that it reaches; its offset where it has none."""
        if 0 in self.shape:
            return self.offset
        sides = zip(self.strides, self.shape, strict=True)
        return self.offset + 1 + sum(stride * (side - 1) for stride, side in sides)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view itself; a parameter that isn't contiguous is copied first."""
        base = tensor.detach().contiguous()
        return base.as_strided(self.shape, self.strides, base.storage_offset() + self.offset)


def is_transformers_model(module: torch.nn.Module) -> bool:
    return any(
        cls.__name__ == "PreTrainedModel" and cls.__module__.startswith("transformers.")
        for cls in type(module).__mro__
    )


def declared_ties(module: torch.nn.Module) -> Mapping[str, str]:
    """Alias → name in the checkpoint, as the model's class and configuration declare them."""
    ties = getattr(module, "all_tied_weights_keys", None)
    return dict(ties) if isinstance(ties, Mapping) else {}


def not_written(module: torch.nn.Module, name: str) -> bool:
    """Whether `save_pretrained` leaves the name out."""
    ignored = getattr(module, "_keys_to_ignore_on_save", None)
    return ignored is not None and name in ignored


def keeps_fp32(module: torch.nn.Module, name: str) -> bool:
    """Whether the model's class wants this parameter in FP32 beside BF16 weights."""
    kept = getattr(module, "_keep_in_fp32_modules_strict", None) or ()
    return any(re.search(rf"(^|\.){re.escape(part)}($|\.)", name) for part in kept)


class WrittenViews:
    """Which view of which parameter each written tensor is, by the model's own conversion."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        # Layers are converted alike: their views are found once, and compared by name and shape.
        self._found: dict[tuple[str, torch.Size], list[View]] = {}

    def of(self, state: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, View | None]]:
        """Name in the checkpoint → (name in the module, view of it; None: the tensor itself).

        Raises:
            PublishError: a written tensor is not a view of one parameter.
        """
        written: dict[str, tuple[str, View | None]] = {}
        for name, tensor in state.items():
            shapes = self._convert(name, torch.empty(tensor.shape, device="meta"))
            if shapes is None:
                written[name] = (name, None)
                continue
            views = self._views_of(name, tensor.shape, shapes)
            for target, view in zip(shapes, views, strict=True):
                written[target] = (name, view)
        return written

    def _convert(self, name: str, stand_in: torch.Tensor) -> dict[str, torch.Tensor] | None:
        """What is written for a parameter; None if that is the parameter under its own name."""
        loading: Any = importlib.import_module("transformers.core_model_loading")
        try:
            parts = loading.revert_weight_conversion(self._module, {name: stand_in})
        except (ValueError, KeyError, RuntimeError) as error:
            raise _not_a_view(name) from error
        if list(parts) == [name] and parts[name] is stand_in:
            return None
        return dict(parts)

    def _views_of(
        self, name: str, shape: torch.Size, written: Mapping[str, torch.Tensor]
    ) -> list[View]:
        kind = (re.sub(r"\d+", "#", name), shape)
        if kind not in self._found:
            numbers = torch.arange(shape.numel()).reshape(shape)
            parts = self._convert(name, numbers) or {name: numbers}
            self._found[kind] = [_view_of(name, part) for part in parts.values()]
        views = self._found[kind]
        if [view.shape for view in views] != [tuple(part.shape) for part in written.values()]:
            raise _not_a_view(name)
        return views


def _view_of(name: str, numbers: torch.Tensor) -> View:
    """The strides by which element numbers run, proven for every one of them."""
    if not numbers.numel():
        return View(tuple(numbers.shape), tuple(numbers.stride()), 0)
    first = int(numbers[(0,) * numbers.ndim])
    strides = []
    for axis, side in enumerate(numbers.shape):
        second = [0] * numbers.ndim
        second[axis] = 1
        strides.append(int(numbers[tuple(second)]) - first if side > 1 else 1)
    view = View(tuple(numbers.shape), tuple(strides), first)
    if min(strides, default=0) < 0 or not torch.equal(numbers, view.of(torch.arange(view.end))):
        raise _not_a_view(name)
    return view


def _not_a_view(name: str) -> PublishError:
    return PublishError(
        f"parameter {name!r} is rearranged when it is saved, and not as views of it",
        remedy="pass names=, a function from the module's state dict to the checkpoint's",
    )
