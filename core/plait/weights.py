"""Weights as raw bits, and the pieces of a frame in their tensors."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from plait import workers
from plait.cut import FrameSpec, Segment
from plait.errors import DocumentInvalid, LayoutChanged, UsageError
from plait.fingerprint import ZERO, Fingerprint, fingerprint_run, fingerprint_strided
from plait.layout import Layout, TensorSpec, words_per_item

UNSIGNED: Final[Mapping[int, "np.dtype[Any]"]] = {
    size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)
}

# A full pass is shared out in runs of this many items: some 0.4 ms of work, so that handing it over
# costs little, and the thread that ends last keeps nobody waiting for long.
_PASS_ITEMS: Final = 1 << 21


class Weights(Protocol):
    """One state of a policy's weights, wherever it is held."""

    @property
    def layout(self) -> Layout: ...

    def bits(self, name: str) -> NDArray[Any]:
        """The tensor's items as a 1-d contiguous uint8, uint16, uint32 or uint64 view, row-major.

        Writable where the weights are to be applied to.
        """
        ...


class ArrayWeights:
    """Weights held as numpy arrays.

    An array that isn't C-contiguous is copied, and then can't be applied to: its bits are
    read-only, so that no write gets lost in the copy.

    Args:
        arrays: one for each tensor, of its item size; of its shape, or flat (packed ones: flat).
    Raises:
        LayoutChanged: a tensor is missing, unknown, of another size or shape, or no array of
            little-endian numbers.
    """

    def __init__(self, layout: Layout, arrays: Mapping[str, NDArray[Any]]) -> None:
        odd = sorted({tensor.name for tensor in layout.tensors} ^ set(arrays))
        if odd:
            raise LayoutChanged(f"missing or unknown tensors: {', '.join(odd[:8])}")
        self._layout = layout
        self._bits = {t.name: _array_bits(t, np.asarray(arrays[t.name])) for t in layout.tensors}

    @property
    def layout(self) -> Layout:
        return self._layout

    def bits(self, name: str) -> NDArray[Any]:
        return self._bits[name]


def _array_bits(tensor: TensorSpec, array: NDArray[Any]) -> NDArray[Any]:
    # An array of a packed tensor's shape has more items than the tensor.
    shaped = array.ndim == 1 or array.shape == tensor.shape
    fits = array.dtype.itemsize == tensor.item_bytes and _holds_bits(array.dtype)
    if not (fits and shaped and array.size == tensor.items):
        raise LayoutChanged(
            f"{tensor.name!r} is {array.dtype.str}{list(array.shape)}, "
            f"expected {tensor.dtype}{list(tensor.shape)}"
        )
    if array.flags.c_contiguous:
        return array.reshape(-1).view(UNSIGNED[tensor.item_bytes])
    bits = np.ascontiguousarray(array).reshape(-1).view(UNSIGNED[tensor.item_bytes])
    bits.flags.writeable = False
    return bits


def _holds_bits(dtype: "np.dtype[Any]") -> bool:
    """Whether its items are numbers in memory, the least significant byte first.

    Texts, times, objects and records aren't; V is what other packages' BF16 and FP8 are.
    """
    return dtype.kind in "biufcV" and dtype.names is None and dtype == dtype.newbyteorder("<")


def checked_bits(weights: Weights, tensor: TensorSpec) -> NDArray[Any]:
    """The tensor's bits, once they are what kernels without bounds checks may rely on.

    Raises:
        LayoutChanged: the weights hold something else under that name.
    """
    bits = weights.bits(tensor.name)
    size = UNSIGNED[tensor.item_bytes]
    if bits.dtype != size or bits.shape != (tensor.items,) or not bits.flags.c_contiguous:
        raise LayoutChanged(
            f"bits of {tensor.name!r} are {bits.dtype}{list(bits.shape)}, "
            f"expected contiguous {size}[{tensor.items}]"
        )
    return bits


def readable_bits(weights: Weights, tensor: TensorSpec) -> NDArray[Any]:
    """As `checked_bits`, read-only: kernels are compiled once for mapped files and live memory."""
    bits = checked_bits(weights, tensor).view()
    bits.flags.writeable = False
    return bits


def writable_bits(weights: Weights, tensor: TensorSpec) -> NDArray[Any]:
    """As `checked_bits`, and writable.

    Raises:
        UsageError: the weights are read-only.
    """
    bits = checked_bits(weights, tensor)
    if not bits.flags.writeable:
        raise UsageError(
            f"bits of {tensor.name!r} are read-only", remedy="apply to weights that own their bits"
        )
    return bits


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a frame's segment that lies in one tensor.

    Attributes:
        tensor: that holds it.
        first_word: canonical index of the piece's first word.
        start_item: of the piece in the tensor.
        items: in all runs together.
        frame_offset: frame-local number of its first item.
        run: items of one run; `items` where the piece is contiguous.
        stride: items from one run's start to the next one's; 0 where it is contiguous.
    """

    tensor: TensorSpec
    first_word: int
    start_item: int
    items: int
    frame_offset: int
    run: int
    stride: int

    def view(self, bits: NDArray[Any]) -> NDArray[Any]:
        """The piece of the tensor's bits, [items] or [repeats, run], without a copy."""
        if self.run == self.items:
            return bits[self.start_item : self.start_item + self.items]
        shape = (self.items // self.run, self.run)
        strides = (self.stride * bits.itemsize, bits.itemsize)
        return np.lib.stride_tricks.as_strided(bits[self.start_item :], shape, strides)


def pieces(frame: FrameSpec, layout: Layout) -> list[Piece]:
    """A frame's pieces, in the order of its items, which they cover.

    Raises:
        DocumentInvalid: the frame doesn't fit the layout's tensors.
    """
    return [
        piece
        for segment, offset in zip(frame.segments, frame.offsets, strict=False)
        for piece in _segment_pieces(segment, offset, frame.item_bytes, layout)
    ]


def _segment_pieces(
    segment: Segment, offset: int, item_bytes: int, layout: Layout
) -> Iterator[Piece]:
    words = words_per_item(item_bytes)
    end = segment.first_word + (segment.repeats - 1) * segment.stride + segment.run * words
    if end > layout.total_words:
        raise DocumentInvalid(f"{segment} ends beyond word {layout.total_words}")
    for tensor, start in layout.tensors_in(segment.first_word, end):
        first = max(segment.first_word, start)
        inside = min(end, start + tensor.words) - first
        if tensor.item_bytes != item_bytes or (first - start) % words or inside % words:
            raise DocumentInvalid(f"{segment} doesn't hold whole items of {tensor}")
        if segment.repeats == 1:
            items, run, stride = inside // words, inside // words, 0
        elif first + inside == end and first == segment.first_word and segment.stride % words == 0:
            items, run, stride = segment.items, segment.run, segment.stride // words
        else:
            raise DocumentInvalid(f"{segment} strides across tensors or items")
        yield Piece(tensor, first, (first - start) // words, items, offset, run, stride)
        offset += items


def gather(frame: FrameSpec, weights: Weights) -> NDArray[Any]:
    """The frame's items in its order, copied: unsigned integers [frame.items]."""
    items = np.empty(frame.items, UNSIGNED[frame.item_bytes])
    for piece in pieces(frame, weights.layout):
        view = piece.view(checked_bits(weights, piece.tensor))
        end = piece.frame_offset + piece.items
        items[piece.frame_offset : end].reshape(view.shape)[...] = view
    return items


def scatter(frame: FrameSpec, weights: Weights, items: NDArray[Any]) -> None:
    """Writes the frame's items [frame.items] to where they belong.

    Raises:
        UsageError: another number or size of items, or read-only weights.
    """
    if items.shape != (frame.items,) or items.dtype != UNSIGNED[frame.item_bytes]:
        raise UsageError(
            f"items are {items.dtype}{list(items.shape)}, expected "
            f"{UNSIGNED[frame.item_bytes]}[{frame.items}]"
        )
    placed = [(p, writable_bits(weights, p.tensor)) for p in pieces(frame, weights.layout)]
    for piece, bits in placed:
        view = piece.view(bits)
        end = piece.frame_offset + piece.items
        view[...] = items[piece.frame_offset : end].reshape(view.shape)


def fingerprint_items(frame: FrameSpec, items: NDArray[Any]) -> Fingerprint:
    """Fingerprint of a frame's gathered items [frame.items] at the words where they belong."""
    total = ZERO
    for segment, offset in zip(frame.segments, frame.offsets, strict=False):
        part = items[offset : offset + segment.items]
        if segment.repeats == 1:
            total += fingerprint_run(part, segment.first_word)
        else:
            total += fingerprint_strided(
                part, segment.first_word, run=segment.run, stride=segment.stride
            )
    return total


def fingerprint_weights(weights: Weights, *, threads: int | None = None) -> Fingerprint:
    """Fingerprint of the whole weights: a full pass over every bit.

    Args:
        threads: at most as many; by default all of the process's workers.
    Raises:
        UsageError: fewer than one thread.
    """
    if threads is not None and threads < 1:
        raise UsageError(f"a pass on {threads} threads; expected one at least")
    layout = weights.layout

    def runs() -> Iterator[tuple[TensorSpec, int, int]]:
        for tensor, word in zip(layout.tensors, layout.starts, strict=False):
            for start in range(0, tensor.items, _PASS_ITEMS):
                yield tensor, word, start

    def add_run(run: tuple[TensorSpec, int, int]) -> Fingerprint:
        tensor, word, start = run
        part = readable_bits(weights, tensor)[start : start + _PASS_ITEMS]
        return fingerprint_run(part, word + start * words_per_item(tensor.item_bytes))

    return sum(workers.shared().map(add_run, runs(), at_once=threads), ZERO)
