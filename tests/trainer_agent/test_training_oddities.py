"""Models and optimizers as people have them: what changed is published, whoever changed it."""

import pytest
import torch
from torch import nn

from plait.errors import LayoutChanged
from plait_client.registry import RegistryClient
from plait_trainer import AutoDetector, Publisher, ReconstructionDetector, SnapshotDetector
from plait_trainer.choice import DetectorName
from tests.trainer_agent.reading import assert_bits_equal, weights_at
from tests.trainer_agent.registry_process import RegistryProcess
from tests.trainer_agent.resumable import DETECTORS, HeldClient, Resumable
from tests.trainer_agent.tiny_models import as_published


@pytest.mark.parametrize("kind", DETECTORS)
def test_a_persistent_buffer_that_nobody_optimizes_is_published(
    kind: str, client: RegistryClient, policy: str
) -> None:
    run = Resumable(kind)
    with run.publisher(client, policy) as publisher:
        publisher.publish().result()
        seen, scratch = (run.model.get_buffer(name) for name in ("seen", "scratch"))
        seen[1] = 0.75
        scratch[1] = 0.75  # not persistent
        assert publisher.publish().version.changed_elements == 1
        run.step(1)
        seen[2] += 1
        publisher.publish().result()
    assert "scratch" not in weights_at(client, policy, 2)
    assert_bits_equal(weights_at(client, policy, 3), run.expected())


@pytest.mark.parametrize("kind", DETECTORS)
def test_memory_that_is_overwritten_once_publish_returns_is_in_no_version(
    kind: str, shared_registry: RegistryProcess, client: RegistryClient, policy: str
) -> None:
    """The anchor's and the delta's weights, while neither is encoded yet where publish returns."""
    run = Resumable(kind)
    wanted = {}

    def overwrite() -> None:
        with torch.no_grad():
            for tensor in run.model.state_dict().values():
                tensor.view(-1).view(torch.uint8).fill_(0xFF)

    with HeldClient(shared_registry.url) as held, run.publisher(held, policy) as publisher:
        if kind == "snapshot":  # without a copy publish returns once the anchor is committed
            held.gate.clear()
        wanted[1] = run.expected()
        first = publisher.publish()
        kept = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
        overwrite()
        held.gate.set()
        first.result()
        run.model.load_state_dict(kept)
        held.gate.clear()
        run.step(1)
        wanted[2] = run.expected()
        second = publisher.publish()
        overwrite()
        held.gate.set()
        second.result()
    for seq, expected in wanted.items():
        assert_bits_equal(weights_at(client, policy, seq), expected)


@pytest.mark.parametrize("detector", ["snapshot", "reconstruction"])
def test_a_square_matrix_that_lies_transposed_is_published_as_it_is_meant(
    detector: DetectorName, client: RegistryClient, policy: str
) -> None:
    memory = torch.arange(16.0).reshape(4, 4)
    weight = nn.Parameter(memory.t())
    optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.0)
    with Publisher(
        {"w": weight}, optimizer, client=client, policy=policy, detector=detector
    ) as publisher:
        publisher.publish().result()
        for seq in (2, 3):
            before = weights_at(client, policy, seq - 1)["w"]
            with torch.no_grad():
                weight[1, 3] += 8
            assert publisher.publish().version.changed_elements == 1
            now = weights_at(client, policy, seq)["w"]
            assert (now != before).nonzero().tolist() == [[1, 3]]
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        publisher.publish().result()
    assert_bits_equal(weights_at(client, policy, 4), {"w": weight.detach().bfloat16()})


def test_one_misspelt_name_among_twenty_is_refused_and_named(
    client: RegistryClient, policy: str
) -> None:
    state = {f"layers.{number}.w": torch.zeros(3) for number in range(20)}
    given = dict(state)
    with Publisher(lambda: given, client=client, policy=policy) as publisher:
        publisher.publish().result()
        for tensor in state.values():
            tensor += 1
        given = {name.replace("layers.7.", "layer.7."): t for name, t in state.items()}
        with pytest.raises(LayoutChanged, match=r"'layer\.7\.w' is new"):
            publisher.publish()
        # An adapter's wrapping moves all of them one level deeper.
        given = {f"base_model.{name}": tensor for name, tensor in state.items()}
        with pytest.raises(LayoutChanged, match=r"'layers\.0\.w' is missing.*and 32 more"):
            publisher.publish()
        assert client.version(policy, "main").seq == 1
        given = state
        assert publisher.publish().version.changed_elements == 60
    expected = {name: tensor.bfloat16() for name, tensor in state.items()}
    assert_bits_equal(weights_at(client, policy, 2), expected)


# Optimizers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("claims_masters", [False, True])
def test_a_state_in_bf16_is_seen_whatever_an_option_claims(
    claims_masters: bool, client: RegistryClient, policy: str
) -> None:
    torch.manual_seed(4)
    model = nn.Linear(32, 16).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if claims_masters:
        optimizer.param_groups[0]["master_weights"] = True
    detector = AutoDetector()
    with Publisher(model, optimizer, client=client, policy=policy, detector=detector) as publisher:
        publisher.publish().result()
        for _ in range(5):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        publisher.publish().result()
        assert isinstance(detector.chosen, SnapshotDetector)
        assert optimizer.state[model.weight]["exp_avg"].dtype == torch.bfloat16
    assert_bits_equal(weights_at(client, policy, 2), dict(as_published(model)))


def test_amsgrads_maximum_is_what_divides_once_the_moment_has_fallen_below_it(
    client: RegistryClient, policy: str
) -> None:
    torch.manual_seed(5)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.9), amsgrad=True)
    detector = ReconstructionDetector()
    with Publisher(model, optimizer, client=client, policy=policy, detector=detector) as publisher:
        publisher.publish().result()
        for number in range(12):
            scale = 10.0 if number == 0 else 1e-3
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter) * scale
            optimizer.step()
            publisher.publish().result()
        state = optimizer.state[model.weight]
        assert (state["exp_avg_sq"] < state["max_exp_avg_sq"] / 2).all()
        assert detector.report.read_back == 0
        assert detector.report.recovered == 24
    assert_bits_equal(weights_at(client, policy, 13), dict(as_published(model)))


@pytest.mark.parametrize("detector", ["snapshot", "reconstruction"])
def test_parameters_without_a_state_may_have_been_changed_all_the_same(
    detector: DetectorName, client: RegistryClient, policy: str
) -> None:
    """One frozen, one never used, one trained; the frozen one is edited by hand."""
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(8)) for name in "abc"})
    model["a"].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Publisher(model, optimizer, client=client, policy=policy, detector=detector) as publisher:
        publisher.publish().result()
        model["c"].grad = torch.ones(8)
        optimizer.step()
        assert not optimizer.state[model["b"]]
        model["a"].data[3] = 5
        assert publisher.publish().version.changed_elements == 9
    expected = {name: tensor.detach().bfloat16() for name, tensor in model.items()}
    assert_bits_equal(weights_at(client, policy, 2), expected)
