"""Who publishes together, as one process sees it: it has a rank, and the others say nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from plait.errors import PublishError, UsageError
from plait_trainer.converter import ConvertedSource
from plait_trainer.dtypes import DtypeRule
from plait_trainer.lanes import chosen_group
from plait_trainer.shards import is_distributed


@contextmanager
def a_job_of(size: int) -> Iterator[None]:
    distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=size)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def not_looked_at() -> list[object]:
    raise PublishError("this process's tensors aren't as they should be")


def test_a_model_whose_parameters_are_whole_for_a_while_is_sharded_all_the_same() -> None:
    """FSDP2's are between a forward and a backward pass."""
    with a_job_of(2):
        model = fully_shard(nn.Linear(4, 4), mesh=distributed.init_device_mesh("cpu", (2,)))
        assert chosen_group(None, model, not_looked_at) is True
        with torch.no_grad():
            model(torch.ones(1, 4))
        assert not any(map(is_distributed, model.parameters()))
        assert chosen_group(None, model, not_looked_at) is True


def test_converted_tensors_arent_looked_at_before_the_others_are_there() -> None:
    """Or what is wrong on one process would be told to nobody, and awaited for an hour."""
    source = ConvertedSource([], DtypeRule())
    with a_job_of(2):
        assert chosen_group(None, source, not_looked_at) is True


def test_a_process_outside_of_the_group_is_told_so() -> None:
    with a_job_of(3):
        others = distributed.new_group([0, 2])
        with pytest.raises(UsageError, match="rank 1 of the job, isn't in the group"):
            chosen_group(others, nn.Linear(1, 1), not_looked_at)


def test_a_group_needs_torchs_processes() -> None:
    with pytest.raises(UsageError, match=r"needs torch\.distributed"):
        chosen_group(True, nn.Linear(1, 1), not_looked_at)
    assert chosen_group(False, nn.Linear(1, 1), not_looked_at) is False


def test_a_model_that_is_gathered_to_be_read_is_refused() -> None:
    with a_job_of(2):
        model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
        with pytest.raises(UsageError, match="wrapped in FullyShardedDataParallel"):
            chosen_group(None, nn.Sequential(model), not_looked_at)


def test_parameters_that_are_empty_between_the_steps_are_refused() -> None:
    """As DeepSpeed's ZeRO-3 leaves them, with its mark."""
    model = nn.Linear(4, 4)
    for parameter in model.parameters():
        parameter.data = torch.empty(0)
    model.weight.ds_id = 0
    with pytest.raises(UsageError, match="'weight', and 0 more, are partitioned by DeepSpeed"):
        chosen_group(None, model, not_looked_at)
