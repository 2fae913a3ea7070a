"""A run that was killed after its last checkpoint goes on, although the channel has gone on too."""

import logging
from pathlib import Path

import pytest
import torch

from plait.errors import HeadMoved
from plait_client.registry import RegistryClient
from plait_trainer import PublishingLoop
from tests.trainer_agent.reading import assert_bits_equal, weights_at
from tests.trainer_agent.resumable import Resumable


@pytest.mark.parametrize("uncommitted", [False, True])
def test_a_loop_goes_on_from_its_checkpoint_although_the_channel_went_on(
    uncommitted: bool, client: RegistryClient, policy: str, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    run = Resumable("snapshot")
    loop = PublishingLoop(run.model, policy=policy, every=2, client=client)
    loop.begin()
    for number in range(3 if uncommitted else 2):
        run.step(1000 + number)  # changes of its own: chunks are shared by all tests
        loop.step()
    loop.publisher.flush()
    torch.save({"model": run.model.state_dict(), "loop": loop.state_dict()}, tmp_path / "saved")
    for number in range(3, 7):
        run.step(1000 + number)  # changes of its own: chunks are shared by all tests
        loop.step()
    loop.close()
    head = client.version(policy, "main").seq
    assert head > 2

    saved = torch.load(tmp_path / "saved", weights_only=True)
    run = Resumable("snapshot")
    run.model.load_state_dict(saved["model"])
    with pytest.raises(HeadMoved, match="rebase=True to continue from version 2"):
        PublishingLoop(run.model, policy=policy, client=client, state=saved["loop"])
    with caplog.at_level(logging.WARNING, "plait.trainer"):
        loop = PublishingLoop(
            run.model, policy=policy, client=client, state=saved["loop"], rebase=True
        )
    assert f"left behind: {', '.join(map(str, range(head, 2, -1)))}" in caplog.text
    with loop:
        run.step(99)
        loop.step()
        loop.publisher.flush()
    versions = client.versions(policy).versions
    first = versions[1] if uncommitted else versions[0]
    assert (first.seq, first.parent, first.kind) == (head + 1, 2, "delta")
    assert_bits_equal(weights_at(client, policy, "main"), run.expected())
