"""FP32 masters rounded into BF16 parameters: what the copy changes is what is published."""

from typing import Any

import pytest
import torch
from torch import nn

from plait.errors import FingerprintMismatch, PublishError, UsageError
from plait.weights import Weights
from plait_client.registry import RegistryClient
from plait_trainer import Publisher, SnapshotDetector
from plait_trainer.copy_back import CopyBackDetector
from tests.trainer_agent.captures import assert_same_capture
from tests.trainer_agent.reading import assert_bits_equal, weights_at
from tests.trainer_agent.test_snapshot_detector import attached, held, live_of, share_of


class MixedRun:
    """A BF16 model whose optimizer steps FP32 masters; one layer norm stays FP32."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16))
        self.model[0].bfloat16()
        self.model[2].bfloat16()
        narrow = [p for p in self.model.parameters() if p.dtype == torch.bfloat16]
        self.pairs = [(p, p.detach().float()) for p in narrow]
        masters = [nn.Parameter(master) for _, master in self.pairs]
        self.pairs = [(p, m) for (p, _), m in zip(self.pairs, masters, strict=True)]
        self.optimizer = torch.optim.AdamW([*masters, *self.model[1].parameters()], lr=1e-3)

    def step(self) -> None:
        """Without the copy."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()

    def expected(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


def test_versions_of_a_mixed_precision_run_are_the_parameters_bit_for_bit(
    client: RegistryClient, policy: str
) -> None:
    run = MixedRun()
    detector = CopyBackDetector(lambda: run.pairs)
    states = [run.expected()]
    with Publisher(
        run.model, client=client, policy=policy, dtype=None, detector=detector
    ) as publisher:
        publisher.publish().result()
        for step in range(1, 7):
            run.step()
            detector.copy()
            if step % 2 == 0:
                publisher.publish()
                states.append(run.expected())
    for seq, expected in enumerate(states, 1):
        assert_bits_equal(weights_at(client, policy, seq), expected)


def test_it_finds_what_the_snapshot_finds() -> None:
    run = MixedRun(1)
    detector = CopyBackDetector(lambda: run.pairs)
    live = live_of(run.model.state_dict())
    snapshot, layout, cut = attached(run.model.state_dict())
    assert detector.attach(live, share_of(layout, cut)) == snapshot.attach(
        live, share_of(layout, cut)
    )
    for _ in range(3):
        run.step()
        detector.copy()
    assert_same_capture(detector.capture(live), snapshot.capture(live))
    run.step()
    detector.copy()
    found, wanted = detector.capture(live), snapshot.capture(live)
    assert_same_capture(found, wanted)
    detector.keep(found)
    snapshot.keep(wanted)
    assert detector.capture(live).deltas == {}
    run.step()
    detector.copy()
    assert_same_capture(detector.capture(live), snapshot.capture(live))


def prepared() -> tuple[MixedRun, CopyBackDetector, SnapshotDetector, Weights]:
    run = MixedRun(2)
    snapshot, layout, cut = attached(run.model.state_dict())
    detector = CopyBackDetector(lambda: run.pairs)
    kept = held(run.model.state_dict(), layout)
    live = live_of(run.model.state_dict())
    detector.attach(live, share_of(layout, cut), read_back=lambda _names: kept)
    run.step()
    detector.copy()
    return run, detector, snapshot, kept


@pytest.mark.parametrize("then_copied", [False, True])
def test_a_parameter_written_beside_its_master_is_read_back(
    then_copied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    run, detector, snapshot, _ = prepared()
    with torch.no_grad():
        run.pairs[0][0][3] += 1
    if then_copied:
        run.step()
        detector.copy()
    live = live_of(run.model.state_dict())
    found = detector.capture(live)
    assert_same_capture(found, snapshot.capture(live))
    assert "0.weight: written to beside the copy" in caplog.text
    detector.keep(found)
    assert detector.capture(live).deltas == {}


def test_much_is_read_back_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    run, detector, snapshot, _ = prepared()
    for parameter, _ in run.pairs:
        parameter.data += 1
    monkeypatch.setattr("plait_trainer.partial_weights._PART_BYTES", 1)
    assert detector._state is not None
    reads, working = [], detector._state.read_back
    assert working is not None
    detector._state.read_back = lambda names: reads.append(list(names)) or working(names)  # type: ignore[func-returns-value]
    live = live_of(run.model.state_dict())
    assert_same_capture(detector.capture(live), snapshot.capture(live))
    assert reads == [["0.bias"], ["0.weight"], ["2.bias"], ["2.weight"]]


def test_what_is_read_back_must_be_the_kept_state() -> None:
    run, detector, _, kept = prepared()
    with torch.no_grad():
        run.pairs[0][0][3] += 1
    kept.bits("0.weight")[7] ^= 1
    live = live_of(run.model.state_dict())
    with pytest.raises(FingerprintMismatch, match=r"what was read back of 0\.weight"):
        detector.capture(live)
    kept.bits("0.weight")[7] ^= 1
    assert detector.capture(live).deltas


def test_a_base_makes_the_first_capture_the_difference_to_it() -> None:
    run = MixedRun(3)
    snapshot, layout, cut = attached(run.model.state_dict())
    base = held(run.model.state_dict(), layout)
    run.step()
    with torch.no_grad():
        for parameter, master in run.pairs:
            parameter.copy_(master)
    detector = CopyBackDetector(lambda: run.pairs)
    live = live_of(run.model.state_dict())
    detector.attach(live, share_of(layout, cut), base=base)
    assert_same_capture(detector.capture(live), snapshot.capture(live))


def test_parameters_that_share_a_buffer_have_masters_of_their_own() -> None:
    torch.manual_seed(4)
    buffer = torch.randn(160).bfloat16()
    state = {"a": buffer[:96].view(8, 12), "b": buffer[96:], "b.half": buffer[128:]}
    masters = [torch.randn(8, 12), torch.randn(64)]
    detector = CopyBackDetector(lambda: list(zip((state["a"], state["b"]), masters, strict=True)))
    snapshot, layout, cut = attached(state)
    live = live_of(state)
    detector.attach(live, share_of(layout, cut))
    detector.copy()
    assert torch.equal(state["a"], masters[0].bfloat16())
    # Nothing had to be read back: there is nowhere to read it from.
    assert_same_capture(detector.capture(live), snapshot.capture(live))


def test_a_master_that_lies_otherwise_is_refused() -> None:
    parameter = nn.Parameter(torch.zeros(4, 8, dtype=torch.bfloat16))
    detector = CopyBackDetector(lambda: [(parameter, torch.zeros(8, 4).t())])
    _, layout, cut = attached({"w": parameter})
    with pytest.raises(UsageError, match="expected the same"):
        detector.attach(live_of({"w": parameter}), share_of(layout, cut))


def test_pairs_that_are_given_only_once_are_refused_at_the_copy() -> None:
    run = MixedRun(5)
    once = iter(run.pairs)
    detector = CopyBackDetector(lambda: once)
    _, layout, cut = attached(run.model.state_dict())
    detector.attach(live_of(run.model.state_dict()), share_of(layout, cut))
    before = run.expected()
    run.step()
    with pytest.raises(UsageError, match="0 pairs were given, and 4"):
        detector.copy()
    narrow = [name for name, tensor in before.items() if tensor.dtype == torch.bfloat16]
    now = run.expected()
    assert_bits_equal({n: now[n] for n in narrow}, {n: before[n] for n in narrow})


@pytest.mark.parametrize("pair", [1, (torch.zeros(2),), (torch.zeros(2), None)])
def test_what_is_no_pair_is_refused(pair: Any) -> None:
    run = MixedRun(6)
    _, layout, cut = attached(run.model.state_dict())
    with pytest.raises(UsageError, match="expected a parameter and its master"):
        CopyBackDetector(lambda: [pair]).attach(
            live_of(run.model.state_dict()), share_of(layout, cut)
        )
    with pytest.raises(UsageError, match="expected a function"):
        CopyBackDetector([pair])  # type: ignore[arg-type]


def test_masters_of_each_other_s_parameters_publish_what_the_parameters_are() -> None:
    run = MixedRun(7)
    layers = [nn.Linear(4, 4).bfloat16() for _ in range(2)]
    weights = [layer.weight for layer in layers]
    masters = [w.detach().float() for w in weights]
    state = {"a": weights[0].detach(), "b": weights[1].detach(), **run.model.state_dict()}
    detector = CopyBackDetector(lambda: zip(weights, reversed(masters), strict=True))
    snapshot, layout, cut = attached(state)
    live = live_of(state)
    detector.attach(live, share_of(layout, cut))
    snapshot.attach(live, share_of(layout, cut))
    masters[0] += 1
    detector.copy()
    assert torch.equal(weights[1], masters[0].bfloat16())
    assert_same_capture(detector.capture(live), snapshot.capture(live))


def test_an_unattached_detector_is_refused() -> None:
    with pytest.raises(PublishError, match="isn't attached"):
        CopyBackDetector(list).copy()


def test_training_goes_on_with_the_copy_alone_once_it_is_closed() -> None:
    run, detector, _, _ = prepared()
    detector.close()
    run.step()
    detector.copy()
    assert all(torch.equal(p, master.bfloat16()) for p, master in run.pairs)
    with pytest.raises(PublishError, match="isn't attached"):
        detector.capture(live_of(run.model.state_dict()))
