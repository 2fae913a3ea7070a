"""What the in-engine half knows of SGLang itself: which rank this is, and models it can't map."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from plait.errors import MapUnproven


@dataclass(frozen=True, slots=True)
class Place:
    """This process among those that hold a part of the model."""

    rank: int
    world: int


def place() -> Place:
    """Which of the engine's ranks this process is."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    rank = parallel.pp_rank * parallel.tp_size + parallel.tp_rank
    return Place(rank, parallel.tp_size * parallel.pp_size)


def check_mappable(model: nn.Module) -> None:
    """Refuses models that keep something derived from their weights, or keep them transformed.

    An in-place update would leave the derived part stale.

    Raises:
        MapUnproven: naming what it found.
    """
    remedy = "use the reload path"
    if hasattr(model, "post_load_weights"):
        raise MapUnproven(
            f"{type(model).__name__} derives tensors from its weights after loading", remedy=remedy
        )
    for name, module in model.named_modules():
        method: Any = getattr(module, "quant_method", None)
        if method is not None and not type(method).__name__.startswith("Unquantized"):
            raise MapUnproven(
                f"{name!r} is quantised ({type(method).__name__}): its weights are transformed "
                "after loading",
                remedy=remedy,
            )
        if getattr(module, "use_intel_amx_backend", False):
            raise MapUnproven(f"{name!r} keeps its weights packed for AMX", remedy=remedy)
        for transform in ("w13_swiglu_interleaved", "use_flashinfer_trtllm_moe"):
            if getattr(method, transform, False):
                raise MapUnproven(f"{name!r} rearranges its experts ({transform})", remedy=remedy)
