"""The map, read off the engine's own loader: every copy into a live parameter, recorded, not run.

`model.load_weights` is called once with the layout's names and *meta* tensors, which have shapes
and no memory, under a dispatch mode that intercepts what would be written into the live storages.
A copy from a view of a meta tensor becomes a piece; padding is left alone; anything computed, cast
or unknown is `MapUnproven`. Nothing can be damaged: a copy that escaped the mode (from another
thread, say) would raise, because a meta tensor has no data to copy.
"""

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from plait.errors import MapUnproven, PlaitError
from plait.layout import Layout, TensorSpec
from plait.tensors import DTYPES
from plait_rollout.sglang.pieces import Piece, overlap_of, piece_of

_aten: Final = torch.ops.aten

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]


def live_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's parameters and buffers by name, one for each storage, empty ones left out."""
    held: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.numel():
            held.setdefault(_storage(tensor), (name, tensor.detach()))
    return dict(held.values())


def record_map(
    load_weights: LoadWeights, live: dict[str, torch.Tensor], layout: Layout
) -> list[Piece]:
    """Where each item of the layout goes in the live tensors, if anywhere.

    Args:
        load_weights: the engine's own loader; called once, with every name of the layout.
        live: from `live_tensors`; not written to.
    Raises:
        MapUnproven: the loader refuses a tensor, converts or computes a value, or places two
            different items in one spot.
    """
    recorder = _Recorder(live, layout)
    try:
        with torch.no_grad(), _inline_executors(), recorder:
            load_weights(recorder.probes())
    except PlaitError:
        raise
    except Exception as error:
        raise MapUnproven(
            f"the engine's loader refuses {recorder.current!r}: {type(error).__name__}: {error}"
        ) from error
    pieces = list(dict.fromkeys(recorder.pieces))  # a tie may be loaded twice into one place
    _check_targets(pieces)
    return pieces


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Turns the loader's copies into pieces. Reads nothing, writes nothing."""

    def __init__(self, live: dict[str, torch.Tensor], layout: Layout) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pieces: list[Piece] = []
        self.current = ""
        self._layout = layout
        self._live = {_storage(tensor): (name, tensor) for name, tensor in live.items()}
        self._probes: dict[int, tuple[TensorSpec, torch.Tensor]] = {}
        self._scalar: torch.Tensor | None = None

    def probes(self) -> Iterator[tuple[str, torch.Tensor]]:
        for tensor in self._layout.tensors:
            self.current = tensor.name
            if tensor.dtype not in DTYPES:
                raise MapUnproven(f"{tensor.name!r}: torch has no dtype for {tensor.dtype}")
            probe = torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype], device="meta")
            self._probes[_storage(probe)] = (tensor, probe)
            yield tensor.name, probe

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten.copy_.default and self._is_live(args[0]):
            return self._copy(args[0], args[1])
        if func in _FILLS and self._is_live(args[0]):
            return self._fill(args[0])
        if func is _aten._local_scalar_dense.default and self._is_probe(args[0]):
            self._scalar = args[0]
            return 0
        # A copy of a probe is as good as the probe: its values are the same ones.
        if func is _aten.clone.default and self._is_probe(args[0]):
            return args[0]
        if func is _aten._to_copy.default and self._is_probe(args[0]):
            if kwargs.get("dtype") in (None, args[0].dtype):
                return args[0]
            raise MapUnproven(f"the loader casts {self._name(args[0])!r} to {kwargs['dtype']}")
        for value in _written(func, args, kwargs):
            if self._is_live(value):
                raise MapUnproven(
                    f"the loader writes {self._parameter(value)!r} by {func}, which places no "
                    f"tensor as it is (at {self.current!r})"
                )
        return func(*args, **kwargs)

    def _is_live(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and _storage(value) in self._live

    def _is_probe(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and _storage(value) in self._probes

    def _parameter(self, target: torch.Tensor) -> str:
        name, tensor = self._live[_storage(target)]
        if tensor.element_size() != target.element_size():
            raise MapUnproven(f"the storage of {name!r} holds items of two sizes")
        return name

    def _name(self, probe: torch.Tensor) -> str:
        return self._probes[_storage(probe)][0].name

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        if target.numel() == 0:
            return target
        parameter = self._parameter(target)
        if not self._is_probe(source):
            raise MapUnproven(
                f"the loader computes what it writes to {parameter!r} (at {self.current!r})"
            )
        tensor, _ = self._probes[_storage(source)]
        if source.dtype != target.dtype:
            raise MapUnproven(
                f"the engine holds {tensor.name!r} as {target.dtype}, the layout as {source.dtype}",
                remedy="start the engine with the layout's dtype, or use the reload path",
            )
        self._add(tensor, parameter, source.expand_as(target), target)
        return target

    def _fill(self, target: torch.Tensor) -> torch.Tensor:
        """Padding stays as it is; a lone item filled from `item()` is a copy in disguise."""
        if self._scalar is not None and target.numel() == 1:
            tensor, _ = self._probes[_storage(self._scalar)]
            if self._scalar.dtype != target.dtype:
                raise MapUnproven(
                    f"the engine holds {tensor.name!r} as {target.dtype}, "
                    f"the layout as {self._scalar.dtype}"
                )
            scalar = self._scalar.reshape(target.shape)
            self._add(tensor, self._parameter(target), scalar, target)
        self._scalar = None
        return target

    def _add(
        self, tensor: TensorSpec, parameter: str, source: torch.Tensor, target: torch.Tensor
    ) -> None:
        self.pieces.append(
            piece_of(
                tensor,
                parameter,
                tuple(target.shape),
                (int(source.storage_offset()), source.stride()),
                (int(target.storage_offset()), target.stride()),
            )
        )


_FILLS: Final = (_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments that an operation writes to, by its schema."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        yield from value if isinstance(value, (list, tuple)) else (value,)


@contextlib.contextmanager
def _inline_executors() -> Iterator[None]:
    """Runs what this thread submits to thread pools at once, here: a dispatch mode is per thread.

    Some loaders place experts from a pool. Other threads' pools work as ever.
    """
    here = threading.get_ident()
    submit = concurrent.futures.ThreadPoolExecutor.submit

    def inline(
        pool: concurrent.futures.ThreadPoolExecutor, call: Any, /, *args: Any, **kwargs: Any
    ) -> concurrent.futures.Future[Any]:
        if threading.get_ident() != here:
            return submit(pool, call, *args, **kwargs)
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        try:
            future.set_result(call(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - a future carries it to whoever asks
            future.set_exception(error)
        return future

    concurrent.futures.ThreadPoolExecutor.submit = inline  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        concurrent.futures.ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]


def _check_targets(pieces: list[Piece]) -> None:
    by_parameter: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_parameter.setdefault(piece.parameter, []).append(piece)
    for parameter, held in by_parameter.items():
        blocks = []
        for piece in held:
            order = sorted(
                zip(piece.sizes, piece.target_strides, strict=True), key=lambda side: -side[1]
            )
            sizes, strides = zip(*order, strict=True)
            blocks.append((piece.target_start, sizes, strides))
        if (item := overlap_of(blocks)) is not None:
            names = sorted({piece.tensor for piece in held})
            raise MapUnproven(
                f"item {item} of {parameter!r} is loaded from two places (of {names[:8]})"
            )
