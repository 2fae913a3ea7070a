"""Every version holds what the model held, bit for bit."""

import logging
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from plait.errors import LayoutChanged, LimitExceeded, PublisherClosed, PublishError, UsageError
from plait_client.checkout import checkout
from plait_client.checkpoint import CheckpointFolder
from plait_client.registry import RegistryClient
from plait_trainer import Publisher
from tests.trainer_agent.reading import assert_bits_equal, weights_at
from tests.trainer_agent.test_published_tensors import transformers_model
from tests.trainer_agent.tiny_models import Run

PATTERNS = [0x7FC1, 0x7FFF, 0xFFC0, 0x7F80, 0xFF80, 0x0000, 0x8000, 0x0001]


def bf16(bits: list[int]) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)


def changes(client: RegistryClient, policy: str, ref: int) -> int:
    return client.version(policy, str(ref)).changed_elements


def test_every_version_of_a_run_is_the_model_cast_to_bf16(
    client: RegistryClient, policy: str
) -> None:
    run = Run()
    states = [run.expected()]
    with Publisher(run.model, run.optimizer, client=client, policy=policy) as publisher:
        futures = [publisher.publish({"step": 0})]
        for step in range(1, 13):
            run.step()
            if step % 3 and step > 3:
                continue  # several optimizer steps for one publish
            states.append(run.expected())
            futures.append(publisher.publish({"step": step}))
        versions = [future.version for future in futures]
    assert [version.seq for version in versions] == list(range(1, len(states) + 1))
    assert [version.parent for version in versions] == [None, *range(1, len(states))]
    assert [version.kind for version in versions] == ["anchor"] + ["delta"] * (len(states) - 1)
    assert {version.proof for version in versions} == {"full"}
    assert versions[3].metadata == {"step": 3}
    for seq, expected in enumerate(states, 1):
        assert_bits_equal(weights_at(client, policy, seq), expected)


def test_a_checkout_of_a_version_is_the_model(
    client: RegistryClient, policy: str, tmp_path: Path
) -> None:
    model = transformers_model("experts", tied=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.arange(12).reshape(2, 6)
    with Publisher(model, optimizer, client=client, policy=policy, dtype=None) as publisher:
        publisher.publish()
        for _ in range(2):
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            publisher.publish()
    model.save_pretrained(tmp_path / "saved")
    checkout(client, f"{policy}@3", tmp_path / "out")
    found, saved = (CheckpointFolder(tmp_path / name) for name in ("out", "saved"))
    assert found.layout == saved.layout
    for tensor in saved.layout.tensors:
        assert found.bits(tensor.name).tobytes() == saved.bits(tensor.name).tobytes()


def test_an_anchor_holds_every_tensor_however_few_changed(
    client: RegistryClient, policy: str
) -> None:
    state = {f"t{number}": torch.full((4,), float(number)) for number in range(10)}
    with Publisher(state, client=client, policy=policy, dtype=None) as publisher:
        state["t3"][1] = 30
        state["t7"][0] = 70
        publisher.publish().result()
    assert_bits_equal(weights_at(client, policy, 1), state)


def test_a_publish_that_changes_nothing_is_a_version_without_chunks(
    client: RegistryClient, policy: str
) -> None:
    run = Run()
    with Publisher(run.model, client=client, policy=policy) as publisher:
        first = publisher.publish({"step": 1}).version
        same = publisher.publish({"step": 2}).version
        run.step()
        moved = publisher.publish({"step": 3}).version
    assert (same.seq, same.fingerprint, same.changed_elements) == (2, first.fingerprint, 0)
    manifest = client.manifest(same.manifest_digest)
    assert (manifest.chunks, manifest.cut) == ((), None)
    assert moved.parent == 2
    assert_bits_equal(weights_at(client, policy, 2), weights_at(client, policy, 1))
    assert_bits_equal(weights_at(client, policy, 3), run.expected())


def test_one_publish_holds_the_changes_of_all_steps_before_it(
    client: RegistryClient, policy: str
) -> None:
    weight = torch.zeros(16, dtype=torch.bfloat16)
    with Publisher({"w": weight}, client=client, policy=policy) as publisher:
        publisher.publish()
        weight[9] = 1
        for element in (5, 6, 7):
            weight[element] = 1
        weight[9] = 0
        version = publisher.publish().version
    assert (version.changed_elements, version.changed_bytes) == (3, 6)
    assert (version.total_elements, version.dense_bytes) == (16, 32)
    assert weights_at(client, policy, 2)["w"].nonzero().flatten().tolist() == [5, 6, 7]


def test_frozen_unused_and_hand_edited_weights_and_buffers_are_published(
    client: RegistryClient, policy: str
) -> None:
    run = Run()
    run.model.up.weight.requires_grad_(False)
    with Publisher(run.model, run.optimizer, client=client, policy=policy) as publisher:
        publisher.publish()
        with torch.no_grad():
            run.model.up.weight[3, 4] += 1
        assert publisher.publish().version.changed_elements == 1
        run.model.seen[2] = 7
        run.model.scratch[0] = 7  # not persistent
        assert publisher.publish().version.changed_elements == 1
    assert_bits_equal(weights_at(client, policy, 3), run.expected())


def test_an_fp32_bias_beside_bf16_weights_keeps_its_last_bit(
    client: RegistryClient, policy: str
) -> None:
    bias = nn.Parameter(torch.tensor([6.8170, 6.8171]))
    state = {"gate.bias": bias, "gate.weight": nn.Parameter(torch.zeros(2, 2))}
    with Publisher(state, client=client, policy=policy, dtypes={"*.bias": "F32"}) as publisher:
        publisher.publish()
        with torch.no_grad():
            bias[1] += 1e-6
        assert publisher.publish().version.changed_elements == 1
    found = weights_at(client, policy, 2)
    assert_bits_equal(found, {
        "gate.bias": bias.detach(), "gate.weight": torch.zeros(2, 2, dtype=torch.bfloat16)
    })  # fmt: skip


def test_nan_payloads_and_signed_zeros_arrive_bit_for_bit(
    client: RegistryClient, policy: str
) -> None:
    state = {"w": bf16(PATTERNS)}
    with Publisher(state, client=client, policy=policy) as publisher:
        publisher.publish()
        assert publisher.publish().version.changed_elements == 0
        state["w"][3], state["w"][0] = 1.0, float("nan")
        state["w"].view(torch.int16)[6] = 0
        assert publisher.publish().version.changed_elements == 3
    assert_bits_equal(weights_at(client, policy, 1), {"w": bf16(PATTERNS)})
    assert_bits_equal(weights_at(client, policy, 3), state)


def test_scalars_empty_tensors_and_strided_ones_arrive_as_they_are(
    client: RegistryClient, policy: str
) -> None:
    buffer = torch.arange(32.0).reshape(4, 8)
    state = {
        "scale": torch.tensor(1.0), "one": torch.ones(1), "none": torch.empty(0, 16),
        "padded": buffer[:, :6], "transposed": torch.arange(6.0).reshape(2, 3).t(),
    }  # fmt: skip
    with Publisher(state, client=client, policy=policy, dtype=None) as publisher:
        publisher.publish()
        state["scale"] += 1
        assert publisher.publish().version.changed_elements == 1
        buffer[:, 6:] = float("nan")
        assert publisher.publish().version.changed_elements == 0
        state["transposed"][2, 0] = 50
        state["padded"][3, 5] = 60
        assert publisher.publish().version.changed_elements == 2
    found = weights_at(client, policy, 4)
    assert_bits_equal(found, {name: tensor.contiguous() for name, tensor in state.items()})
    assert found["scale"].shape == ()


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_changes_with_its_embedding_only_if_it_is_tied(
    client: RegistryClient, policy: str, tied: bool
) -> None:
    model = transformers_model("dense", tied=tied)
    with Publisher(model, client=client, policy=policy) as publisher:
        publisher.publish().result()
        before = weights_at(client, policy, 1)
        with torch.no_grad():
            model.get_input_embeddings().weight[5] += 1
        assert publisher.publish().version.changed_elements == 8
    after = weights_at(client, policy, 2)
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed == ["model.embed_tokens.weight"]
    assert ("lm_head.weight" in after) is not tied


def test_a_broken_tie_is_refused_and_publishes_nothing(client: RegistryClient, policy: str) -> None:
    model = transformers_model("dense", tied=True)
    with Publisher(model, client=client, policy=policy) as publisher:
        publisher.publish().result()
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach() + 1)
        with pytest.raises(PublishError, match="their bits differ"):
            publisher.publish()
        model.tie_weights()
        publisher.publish().result()
    assert client.version(policy, "main").seq == 2


def test_another_dtype_shape_or_set_of_names_is_refused_in_words(
    client: RegistryClient, policy: str
) -> None:
    model = nn.Module()
    model.register_buffer("mean", torch.zeros(3))
    model.w = nn.Parameter(torch.zeros(16, 2))
    with Publisher(model, client=client, policy=policy) as publisher:
        publisher.publish().result()
        model.mean = model.mean.to(torch.bfloat16)
        with pytest.raises(LayoutChanged, match=r"'mean' is BF16\[3\], expected F32\[3\]"):
            publisher.publish()
        model.mean = torch.zeros(3)
        whole, model.w = model.w, nn.Parameter(torch.zeros(10, 2))
        with pytest.raises(LayoutChanged, match=r"'w' is BF16\[10, 2\], expected BF16\[16, 2\]"):
            publisher.publish()
        model.w = whole
        model.extra = nn.Parameter(torch.zeros(1))
        with pytest.raises(LayoutChanged, match="'extra' is new"):
            publisher.publish()
        del model.extra
        assert publisher.publish().version.changed_elements == 0
    model.w = nn.Parameter(torch.zeros(10, 2))
    with pytest.raises(LayoutChanged, match=r"'w' is BF16\[10, 2\]"):
        Publisher(model, client=client, policy=policy)


def test_a_compiled_model_continues_the_line_of_the_plain_one(
    client: RegistryClient, policy: str
) -> None:
    run = Run()
    with Publisher(run.model, client=client, policy=policy) as publisher:
        publisher.publish()
    compiled = torch.compile(run.model, backend="eager")
    for wrapped in (compiled, nn.DataParallel(run.model)):
        with Publisher(wrapped, client=client, policy=policy) as publisher:
            publisher.publish()
    assert client.version(policy, "main").seq == 3
    prefixed = {f"base_model.model.{n}": t for n, t in run.expected().items()}
    with pytest.raises(LayoutChanged, match=r"'base_model\.model\.down\.bias' is new"):
        Publisher(prefixed, client=client, policy=policy)


def test_an_external_anchor_uploads_nothing(client: RegistryClient, policy: str) -> None:
    run = Run()
    with Publisher(run.model, client=client, policy=policy, external=True) as publisher:
        base = run.expected()
        first = publisher.publish().version
        run.step()
        publisher.publish().result()
    assert (first.external, first.proof) == (True, "unproven")
    assert client.manifest(first.manifest_digest).chunks == ()
    assert_bits_equal(weights_at(client, policy, 2, held=base), run.expected())


def test_an_external_anchor_of_weights_that_nobody_can_hold_is_refused(
    client: RegistryClient, policy: str
) -> None:
    run = Run()
    with Publisher(run.model, client=client, policy=policy, external=True) as publisher:
        run.step()
        with pytest.raises(UsageError, match="changed since the publisher attached"):
            publisher.publish()


def test_side_files_travel_with_the_anchor(
    client: RegistryClient, policy: str, tmp_path: Path
) -> None:
    folder = tmp_path / "config"
    (folder / "chat").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "chat" / "template.jinja").write_text("hello")
    (folder / "model.safetensors").write_text("weights stay")
    run = Run()
    with Publisher(run.model, client=client, policy=policy, side_files=folder) as publisher:
        publisher.publish().result()
    checkout(client, policy, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_text() == "{}"
    assert (tmp_path / "out" / "chat" / "template.jinja").read_text() == "hello"


def test_metadata_beyond_the_limit_is_refused_before_anything_is_captured(
    client: RegistryClient, policy: str
) -> None:
    run = Run()
    with Publisher(run.model, client=client, policy=policy) as publisher:
        publisher.publish()
        run.step()
        with pytest.raises(LimitExceeded, match="metadata of"):
            publisher.publish({"note": "x" * 70_000})
        publisher.publish().result()
    assert_bits_equal(weights_at(client, policy, 2), run.expected())


def test_a_publish_says_what_it_did_and_how_long_it_took(
    client: RegistryClient, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run()
    with caplog.at_level(logging.INFO, "plait.trainer"):
        with Publisher(run.model, client=client, policy=policy) as publisher:
            publisher.publish()
            run.step()
            future = publisher.publish()
        metrics = future.metrics
    assert min(metrics.detect_seconds, metrics.encode_seconds, metrics.upload_seconds) > 0
    assert metrics.commit_seconds > 0
    assert metrics.changed_elements == changes(client, policy, 2) > 0
    assert metrics.payload_bytes == future.version.payload_bytes
    line = re.compile(rf"published {policy}@2 \(delta, \d+ of \d+ elements, \d+ bytes\) detect ")
    assert [record for record in caplog.messages if line.match(record)]


def test_a_closed_publisher_refuses_and_closing_flushed(
    client: RegistryClient, policy: str
) -> None:
    run = Run()
    publisher = Publisher(run.model, client=client, policy=policy)
    future = publisher.publish()
    publisher.close()
    assert future.done()
    publisher.close()
    with pytest.raises(PublisherClosed):
        publisher.publish()


def test_an_unattached_publisher_refuses(client: RegistryClient, policy: str) -> None:
    publisher = Publisher(Run().model, client=client, policy=policy, attach=False)
    with pytest.raises(PublishError, match="isn't attached"):
        publisher.publish()
    assert publisher.version is None
    publisher.close()
