"""The bridge to torch: bit views, scatter and gather, and the fingerprint, on any device.

Nothing here converts a value: a tensor is its bits. On a CPU the views are numpy's, and the loops
are the same numba kernels that the rest of the core runs; elsewhere they are torch's integer
arithmetic, equal bit for bit. `plait.tensors.codec` is the codec in it.
"""

from plait.tensors.bits import DTYPES, bits_of, dtype_name, integer_view, storage_bits
from plait.tensors.fingerprint import fingerprint_items, fingerprint_slab, fingerprint_tensors
from plait.tensors.scatter import gather_at, scatter_at
from plait.tensors.weights import StateDictWeights, layout_of_tensors

__all__ = [
    "DTYPES",
    "StateDictWeights",
    "bits_of",
    "dtype_name",
    "fingerprint_items",
    "fingerprint_slab",
    "fingerprint_tensors",
    "gather_at",
    "integer_view",
    "layout_of_tensors",
    "scatter_at",
    "storage_bits",
]
