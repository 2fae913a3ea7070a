"""The block that a process holds of a DTensor is where torch has put it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from plait.errors import PublishError
from plait_trainer.converter import Block, load
from plait_trainer.huggingface import View
from plait_trainer.live import LiveTensor, ShardView, block_of
from plait_trainer.shards import is_distributed, local_part, view_of, written_views
from plait_trainer.ties import without_aliases

Placements = tuple[Placement, ...]


@contextmanager
def rank_of(mesh: tuple[int, ...], rank: int) -> Iterator[DeviceMesh]:
    """A mesh, as one of its processes sees it; there are no others."""
    size = torch.Size(mesh).numel()
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield DeviceMesh("cpu", torch.arange(size).reshape(mesh))
    finally:
        distributed.destroy_process_group()


def placed(mesh: DeviceMesh, shape: tuple[int, ...], placements: Placements) -> DTensor:
    """A tensor of its own elements' numbers, split by the placements' own rules."""
    local = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    for number, placement in enumerate(placements):
        if isinstance(placement, Shard | _StridedShard):
            parts, _ = placement._split_tensor(local, mesh.size(number), with_padding=False)
            local = parts[mesh.get_local_rank(number)]
    whole = torch.empty(shape)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


@pytest.mark.parametrize(
    ("mesh", "shape", "placements"),
    [
        ((3,), (7, 4), (Shard(0),)),
        ((3,), (7, 4), (Shard(1),)),
        ((4,), (2, 3), (Shard(0),)),  # empty on two ranks
        ((3,), (4, 5), (Replicate(),)),
        ((2,), (), (Replicate(),)),
        ((2, 2), (5, 6), (Replicate(), Shard(0))),
        ((2, 3), (5, 7, 3), (Shard(2), Shard(1))),
        ((2, 2), (9, 2), (Shard(0), Shard(0))),
        ((2, 2), (8, 3), (_StridedShard(0, split_factor=2), Shard(0))),
        ((2, 2), (3, 8), (_StridedShard(1, split_factor=2), Shard(1))),
    ],
)
def test_the_block_holds_the_elements_that_torch_has_put_there(
    mesh: tuple[int, ...], shape: tuple[int, ...], placements: Placements
) -> None:
    numbers = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    seen = torch.zeros(shape, dtype=torch.bool)
    for rank in range(torch.Size(mesh).numel()):
        with rank_of(mesh, rank) as devices:
            view = view_of("w", placed(devices, shape, placements), torch.float32)
        assert isinstance(view, ShardView)
        assert view.spec.shape == shape
        held = numbers[view.block.region]
        assert torch.equal(view.tensor, held)
        seen[view.block.region] = True
    assert seen.all()


def test_a_block_with_gaps_is_refused() -> None:
    """A strided placement splits 9 rows as 5 and 4, and each of these unevenly."""
    refused = []
    for rank in range(4):
        with rank_of((2, 2), rank) as mesh:
            tensor = placed(mesh, (9, 2), (_StridedShard(0, split_factor=2), Replicate()))
            with pytest.raises(PublishError, match=r"'w' is placed .* isn't consecutive") as error:
                view_of("w", tensor, torch.float32)
            refused.append(error.value)
    assert len(refused) == 4


def test_a_partial_sum_is_refused() -> None:
    with rank_of((2,), 1) as mesh:
        tensor = DTensor.from_local(torch.ones(3), mesh, (Partial(),), run_check=False)
        with pytest.raises(PublishError, match="a part of a sum"):
            view_of("w", tensor, torch.float32)


def test_a_mesh_that_doesnt_reach_this_process_gives_it_nothing() -> None:
    with rank_of((3,), 2):
        mesh = DeviceMesh("cpu", [0, 1])
        tensor = DTensor.from_local(
            torch.empty(0), mesh, (Shard(0),), run_check=False, shape=torch.Size((4, 2)),
            stride=(2, 1),
        )  # fmt: skip
        view = view_of("w", tensor, torch.float32)
    assert isinstance(view, ShardView)
    assert (view.spec.shape, view.block.items) == ((4, 2), 0)


def test_shards_of_several_tensors_arent_taken_for_one() -> None:
    """Their wrappers have no memory, and empty shards have no address."""
    for rank in range(3):
        with rank_of((3,), rank) as mesh:
            one, other = (placed(mesh, (2, 3), (Shard(0),)) for _ in range(2))
            state = {"a": one, "b": other, "c": one.detach()}
            assert list(without_aliases(state, {})) == ["a", "b"]


def test_a_declared_alias_is_compared_where_it_lies() -> None:
    with rank_of((2,), 1) as mesh:
        one, other = (placed(mesh, (3, 2), (Shard(0),)) for _ in range(2))
        assert list(without_aliases({"a": one, "b": other}, {"b": "a"})) == ["a"]
        local_part(other)[0, 0] += 1
        with pytest.raises(PublishError, match="'b' is tied to 'a', but their bits differ"):
            without_aliases({"a": one, "b": other}, {"b": "a"})


def test_a_plain_tensor_is_all_there_is() -> None:
    plain = torch.ones(2, 2, requires_grad=True)
    assert not is_distributed(plain)
    assert not isinstance(view_of("w", plain, plain.dtype), ShardView)
    assert local_part(plain).data_ptr() == plain.data_ptr()


# Three experts, of [2, 5] as they are written: the second half of each one's columns, transposed.
STACK = (3, 5, 4)
EXPERTS = {f"expert-{number}": View((2, 5), (1, 4), number * 20 + 2) for number in range(3)}


def experts_of(mesh: DeviceMesh, placement: Placement) -> list[LiveTensor]:
    written = {name: (torch.float32, view) for name, view in EXPERTS.items()}
    return list(written_views(placed(mesh, STACK, (placement,)), written))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_stacked_experts_are_published_by_whoever_holds_them(size: int) -> None:
    """Over five processes two have none."""
    numbers = torch.arange(60.0)
    found: list[str] = []
    for rank in range(size):
        with rank_of((size,), rank) as mesh:
            views = experts_of(mesh, Shard(0))
        assert [view.spec.name for view in views] == list(EXPERTS)
        for view in views:
            assert isinstance(view, ShardView)
            assert view.spec.shape == (2, 5)
            assert view.block.is_whole or not view.block.items
            if view.block.items:
                assert torch.equal(view.tensor, EXPERTS[view.name].of(numbers))
                found.append(view.name)
    assert found == list(EXPERTS)


def test_stacked_experts_may_be_held_by_all() -> None:
    with rank_of((2,), 1) as mesh:
        assert all(block_of(view).is_whole for view in experts_of(mesh, Replicate()))


@pytest.mark.parametrize("dim", [1, 2])
def test_an_expert_that_lies_on_several_processes_is_refused_in_words(dim: int) -> None:
    with rank_of((2,), 0) as mesh, pytest.raises(PublishError, match="'expert-0' is written as"):
        experts_of(mesh, Shard(dim))


class OneTensor:
    """A converter of a model that is a single vector."""

    shapes: Mapping[str, tuple[int, ...]] = {"w": (4,)}
    ties: Mapping[str, str] = {}

    def blocks(self, state: Mapping[str, torch.Tensor]) -> Iterator[Block]:
        yield Block.whole("w", state["w"])


def test_a_checkpoint_isnt_loaded_into_shards() -> None:
    with rank_of((2,), 0) as mesh:
        own = {"w": placed(mesh, (4,), (Shard(0),))}
        with pytest.raises(PublishError, match="'w' is loaded into a distributed tensor"):
            load(OneTensor(), own, {"w": torch.ones(4)})
