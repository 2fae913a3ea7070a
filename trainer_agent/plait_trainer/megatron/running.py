"""The place of this very process, from a Megatron-Core that runs in it."""

import importlib
from typing import Any

from plait.errors import NotInstalledError, UsageError
from plait_trainer.megatron.place import ParallelPlace


def current_place(*, chunk: int = 0, layers: range | None = None) -> ParallelPlace:
    """What `megatron.core.parallel_state` says.

    Args:
        chunk: which of the process's model chunks, in a virtual pipeline.
        layers: indices of the chunk's layers, where stages are uneven.
    Raises:
        NotInstalledError: there is no Megatron-Core.
        UsageError: its parallel state isn't initialised, or has no such chunk.
    """
    state = _parallel_state()
    if not state.model_parallel_is_initialized():
        raise UsageError(
            "Megatron-Core's parallel state isn't initialised",
            remedy="call initialize_model_parallel() first, or give a ParallelPlace",
        )
    return ParallelPlace(
        tp_rank=state.get_tensor_model_parallel_rank(),
        tp_size=state.get_tensor_model_parallel_world_size(),
        ep_rank=state.get_expert_model_parallel_rank(),
        ep_size=state.get_expert_model_parallel_world_size(),
        etp_rank=state.get_expert_tensor_parallel_rank(),
        etp_size=state.get_expert_tensor_parallel_world_size(),
        pp_rank=state.get_pipeline_model_parallel_rank(),
        pp_size=state.get_pipeline_model_parallel_world_size(),
        vp_rank=chunk,
        vp_size=state.get_virtual_pipeline_model_parallel_world_size() or 1,
        layers=layers,
    )


def _parallel_state() -> Any:
    try:
        return importlib.import_module("megatron.core.parallel_state")
    except ModuleNotFoundError as error:
        raise NotInstalledError(
            "Megatron-Core isn't installed", remedy="pip install megatron-core, or give a place"
        ) from error
