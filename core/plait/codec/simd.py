"""Instructions that numba has no name for: compare 64 items at once, find and count bits.

They are written in LLVM's portable vector types: every CPU runs them, a wide one in a few cycles.
"""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 64


@intrinsic  # type: ignore[untyped-decorator]
def differing(_typing: Any, old: Any, new: Any, start: Any) -> Any:  # noqa: ARG001
    """Bit i of the result: whether `old[start + i] != new[start + i]`, for 64 items.

    Args:
        old, new: 1-d contiguous arrays of one unsigned dtype; `start + 64` lies within both.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        old_type, new_type, _ = signature.args
        item = ir.IntType(old_type.dtype.bitwidth)
        vectors = []
        for array_type, value in ((old_type, arguments[0]), (new_type, arguments[1])):
            array = context.make_array(array_type)(context, builder, value)
            first = cgutils.gep(builder, array.data, arguments[2])
            pointer = builder.bitcast(first, ir.VectorType(item, LANES).as_pointer())
            vectors.append(builder.load(pointer, align=1))
        return builder.bitcast(builder.icmp_unsigned("!=", *vectors), ir.IntType(LANES))

    if old.dtype != new.dtype or old.ndim != 1 or new.ndim != 1:
        return None
    return types.uint64(old, new, types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def lowest_bit(_typing: Any, mask: Any) -> Any:  # noqa: ARG001
    """Number of the lowest set bit of a uint64; 64 if there is none."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.intp(types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def bits_set(_typing: Any, mask: Any) -> Any:  # noqa: ARG001
    """How many bits of a uint64 are set."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.intp(types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(_typing: Any, array: Any, item: Any) -> Any:  # noqa: ARG001
    """Asks for an item's cache line, into the second cache; the array needn't have that many.

    More lines can be on their way there at once than to the first one, and an item comes from
    there in no time.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        place = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [place.type, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(function, [place, number(0), number(2), number(1)])
        return context.get_dummy_value()

    return types.none(array, types.intp), generate
