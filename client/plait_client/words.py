"""Single items of mapped weights by their canonical word: read them, write them."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import DocumentInvalid
from plait.layout import Layout, words_per_item
from plait.weights import UNSIGNED, Weights

Words = NDArray[np.int64]


def read_items(weights: Weights, words: Words, item_bytes: int) -> NDArray[Any]:
    """The items whose first words these are: unsigned of `item_bytes`, [len(words)]."""
    found = np.empty(words.size, UNSIGNED[item_bytes])
    for name, rows, items in by_tensor(weights.layout, words, item_bytes):
        found[rows] = weights.bits(name)[items]
    return found


def write_items(weights: Weights, words: Words, bits: NDArray[Any]) -> None:
    """Write items at their first words. Absolute bits, so that a repeat changes nothing."""
    for name, rows, items in by_tensor(weights.layout, words, bits.itemsize):
        weights.bits(name)[items] = bits[rows]


def by_tensor(
    layout: Layout, words: Words, item_bytes: int
) -> Iterator[tuple[str, Any, NDArray[np.int64]]]:
    """Tensor name, its rows of `words`, and their item numbers in the tensor.

    Raises:
        DocumentInvalid: a word beyond the layout, or of a tensor with other items.
    """
    if words.size and not 0 <= int(words.min()) <= int(words.max()) < layout.total_words:
        raise DocumentInvalid(f"words beyond the layout's {layout.total_words}")
    owner = np.searchsorted(np.asarray(layout.starts, np.int64), words, side="right") - 1
    # Frames list their words mostly in order: a few long runs of one tensor each.
    bounds = [0, *(np.flatnonzero(np.diff(owner)) + 1).tolist(), words.size]
    for first, end in itertools.pairwise(bounds):
        if first == end:
            continue
        index = int(owner[first])
        tensor = layout.tensors[index]
        if tensor.item_bytes != item_bytes:
            raise DocumentInvalid(f"items of {item_bytes} bytes in {tensor}")
        rows = slice(first, end)
        items = (words[rows] - layout.starts[index]) // words_per_item(item_bytes)
        yield tensor.name, rows, items
