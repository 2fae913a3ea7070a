"""Which processes publish together, and the two lanes on which they speak with each other."""

import importlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import distributed

from plait.errors import UsageError
from plait_trainer.converter import ConvertedSource
from plait_trainer.group import Alone, Group
from plait_trainer.live import ShardView
from plait_trainer.shards import is_distributed

logger = logging.getLogger("plait.trainer")

# Seconds: for ever, as far as torch's clocks go.
_LONGEST: Final = 365 * 86400.0

# None: as the model says. True, False: all of torch's processes, or this one alone.
Choice: TypeAlias = "distributed.ProcessGroup | bool | None"


@dataclass(frozen=True)
class Lanes:
    """The same processes twice: what two threads exchange must not get into each other's way.

    Attributes:
        captures: attaching, and the votes on captures.
        commits: what the worker exchanges.
    """

    captures: Group
    commits: Group

    @classmethod
    def open(cls, group: Choice, *, timeout: float, patience: float) -> "Lanes":
        """Every process of the group opens them.

        Args:
            group: none stands for this process alone.
            timeout: seconds that a process waits for another one at the same step.
            patience: that a publish has with a registry: it may wait so long for an earlier commit,
                for its chunks and for its own commit.
        """
        if group is None or group is False:
            return cls(Alone(), Alone())
        torch_group: Any = importlib.import_module("plait_trainer.torch_group")
        parent = None if group is True else group

        def opened() -> Group:
            most, opening = min(timeout + 3 * patience, _LONGEST), min(timeout, _LONGEST)
            lane: Group = torch_group.TorchGroup(parent, timeout=most, open_within=opening)
            return lane

        return cls(captures=opened(), commits=opened())

    def close(self, *, within: float | None = None) -> None:
        # In this order, those who still publish learn at once that this process doesn't.
        self.captures.close(within=within)
        self.commits.close(within=within)


def chosen_group(group: Choice, model: object, views: Callable[[], Iterable[object]]) -> Choice:
    """The processes that publish a model together.

    Torch's processes do where the model is sharded over them, or copied to them by DDP.

    Args:
        group: what the caller said.
        views: the model's live tensors, where it isn't one that tells at once.
    Raises:
        UsageError: a group was asked for where torch has none, or that this process isn't in; or
            the model is sharded in a way that hides what this process holds of it.
    """
    _refuse_hidden(model)
    running = distributed.is_available() and distributed.is_initialized()
    size = distributed.get_world_size() if running else 1
    if group is False:
        return False
    if group is not None:
        if not running:
            raise UsageError(
                "a group of publishers needs torch.distributed",
                remedy="call torch.distributed.init_process_group first",
            )
        if not isinstance(group, bool | distributed.ProcessGroup):
            raise UsageError(
                f"this process, rank {distributed.get_rank()} of the job, isn't in the group",
                remedy="construct publishers in the group's processes only",
            )
        return group
    if size == 1:
        return False
    if _is_replicated(model) or _is_sharded(model, views):
        logger.info("the model is spread over %d processes, which publish it together", size)
        return True
    logger.info(
        "the model of this process isn't spread over the %d of the job: it publishes alone", size
    )
    return False


def _is_replicated(model: object) -> bool:
    return isinstance(model, torch.nn.Module) and any(
        isinstance(module, torch.nn.parallel.DistributedDataParallel) for module in model.modules()
    )


def _is_sharded(model: object, views: Callable[[], Iterable[object]]) -> bool:
    if isinstance(model, torch.nn.Module):
        # Between a forward and a backward pass FSDP2's parameters are whole.
        parameters, modules = model.parameters(), model.modules()
        return any(map(is_distributed, parameters)) or any(_is_a(m, "FSDPModule") for m in modules)
    if isinstance(model, Mapping):
        return any(map(is_distributed, model.values()))
    if isinstance(model, ConvertedSource):
        # Always. Not looked at: what is wrong with one process's tensors is told to the others.
        return True
    return any(isinstance(view, ShardView) for view in views())


def _refuse_hidden(model: object) -> None:
    """Refuses modules whose tensors aren't what this process holds."""
    if not isinstance(model, torch.nn.Module):
        return
    if any(_is_a(module, "FullyShardedDataParallel") for module in model.modules()):
        raise UsageError(
            "the model is wrapped in FullyShardedDataParallel, which gathers all of it to be read",
            remedy="shard it with fully_shard (FSDP2)",
        )
    # DeepSpeed's mark on a parameter that it has partitioned.
    hidden = [name for name, parameter in model.named_parameters() if hasattr(parameter, "ds_id")]
    if hidden:
        raise UsageError(
            f"parameter {hidden[0]!r}, and {len(hidden) - 1} more, are partitioned by DeepSpeed "
            "ZeRO-3, and empty between the steps",
            remedy="train with ZeRO stage 2 at most, or with fully_shard (FSDP2)",
        )


def _is_a(module: torch.nn.Module, name: str) -> bool:
    """Whether it is an instance of torch's class of that name, which takes seconds to import."""
    return any(
        cls.__name__ == name and cls.__module__.startswith("torch.distributed.fsdp")
        for cls in type(module).__mro__
    )
