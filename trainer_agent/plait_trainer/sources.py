"""Published tensors from a module, or from any mapping of tensors."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from plait.errors import UsageError
from plait_trainer import huggingface
from plait_trainer.dtypes import DtypeRule
from plait_trainer.live import LiveTensor, TensorSource
from plait_trainer.naming import canonical_names
from plait_trainer.options import check_mapping
from plait_trainer.shards import view_of, written_views
from plait_trainer.ties import without_aliases

State: TypeAlias = Mapping[str, torch.Tensor]
Converter: TypeAlias = Callable[[State], State]
Written: TypeAlias = Mapping[str, tuple[str, "huggingface.View | None"]]


@dataclass(frozen=True, eq=False)
class MappingSource:
    """Tensors by name: a mapping, or a function that gives one anew at every publish.

    Attributes:
        ties: alias → the name that is published.
        convert: from these names to the checkpoint's, by views.
    """

    state: State | Callable[[], State]
    dtypes: DtypeRule
    ties: Mapping[str, str] = field(default_factory=dict)
    convert: Converter | None = None

    def tensors(self) -> Iterator[LiveTensor]:
        state = canonical_names(_checked(self.state() if callable(self.state) else self.state))
        state = without_aliases(state, self.ties)
        written = state if self.convert is None else self.convert(state)
        for name, tensor in written.items():
            yield view_of(name, tensor, self.dtypes.published(name, tensor, kept=False))


def _checked(state: object) -> State:
    """
    Raises:
        UsageError: not tensors by name.
    """
    tensors = check_mapping(state, "the model")
    if odd := [name for name, value in tensors.items() if not isinstance(value, torch.Tensor)]:
        raise UsageError(
            f"{odd[0]!r} is a {type(tensors[odd[0]]).__name__}; expected a tensor",
            remedy="publish named tensors only: leave other state out",
        )
    return tensors


class ModuleSource:
    """A module's parameters and persistent buffers, as `save_pretrained` would write them.

    Tied tensors appear once, wrappers' prefixes are taken off, and a transformers model's stacked
    experts are published one by one, as views.

    Args:
        convert: from the module's names to the checkpoint's, by views, instead of the model's own.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        dtypes: DtypeRule,
        ties: Mapping[str, str] | None = None,
        convert: Converter | None = None,
    ) -> None:
        self._module = module
        self._dtypes = dtypes
        self._ties = ties or {}
        self._convert = convert
        self._signature: object = None
        self._views: Written = {}
        self._conversion = huggingface.WrittenViews(unwrapped(module))

    def tensors(self) -> Iterator[LiveTensor]:
        inner = unwrapped(self._module)
        own = _state_of(self._module)
        origins = canonical_names({name: name for name in own})
        state: State = without_aliases(
            {
                name: own[origin] for name, origin in origins.items()
                if not huggingface.not_written(inner, name)
            },
            {**huggingface.declared_ties(inner), **self._ties},
        )  # fmt: skip
        buffers = {name for name, _ in self._module.named_buffers(remove_duplicate=False)}
        if self._convert is not None:
            state = self._convert(state)
        stacks: dict[str, dict[str, tuple[torch.dtype, huggingface.View]]] = {}
        for name, (origin, view) in self._written(inner, state).items():
            kept = origins.get(origin) in buffers or huggingface.keeps_fp32(inner, origin)
            dtype = self._dtypes.published(name, state[origin], kept=kept)
            if view is None:
                yield view_of(name, state[origin], dtype)
            else:
                stacks.setdefault(origin, {})[name] = dtype, view
        for origin, views in stacks.items():
            yield from written_views(state[origin], views)

    def _written(self, inner: torch.nn.Module, state: State) -> Written:
        """Checkpoint name → (name in the state, view of it; None: the tensor itself)."""
        if self._convert is not None or not huggingface.is_transformers_model(inner):
            return {name: (name, None) for name in state}
        signature = tuple((name, tensor.shape) for name, tensor in state.items())
        if signature != self._signature:
            self._views = self._conversion.of(state)
            self._signature = signature
        return self._views


def source_of(
    model: torch.nn.Module | State | Callable[[], State] | TensorSource,
    dtypes: DtypeRule,
    ties: Mapping[str, str],
    convert: Converter | None,
) -> TensorSource:
    """The source that a publisher's first argument stands for.

    Raises:
        UsageError: none that it could be; or the others aren't what they should be.
    """
    if not all(isinstance(name, str) for name in check_mapping(ties, "ties").values()):
        raise UsageError(f"ties is {ties!r:.80}; expected text → text")
    if convert is not None and not callable(convert):
        raise UsageError(f"names is {convert!r:.80}; expected a function of a state dict")
    if isinstance(model, torch.nn.Module):
        return ModuleSource(model, dtypes, ties, convert)
    if isinstance(model, TensorSource):
        if dtypes.overrides or ties or convert is not None:
            raise UsageError(
                f"a {type(model).__name__} says itself how its tensors are published",
                remedy="tell it, rather than the publisher, of dtypes, ties and names",
            )
        return model
    if isinstance(model, Mapping) or callable(model):
        return MappingSource(model, dtypes, ties, convert)
    raise UsageError(
        f"can't publish a {type(model).__name__}; expected a module, named tensors, or a function "
        "that gives them"
    )


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside torch.compile's and data-parallel wrappers."""
    for attribute in ("_orig_mod", "module"):
        inner = getattr(module, attribute, None)
        is_wrapper = list(dict(module.named_children())) == [attribute]
        if is_wrapper and isinstance(inner, torch.nn.Module):
            return unwrapped(inner)
    return module


def _state_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state dict without what isn't a weight (`_extra_state` holds recipes, not tensors)."""
    state = module.state_dict()
    return {
        name: value for name, value in state.items()
        if isinstance(value, torch.Tensor) and name.rpartition(".")[2] != "_extra_state"
    }  # fmt: skip
