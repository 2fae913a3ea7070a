"""States that no publisher has given are refused before anything happens; a registry that is away
while a trainer attaches is waited for."""

from typing import Any

import pytest

from plait.errors import FormatError, PlaitError, RegistryUnavailable, UsageError
from plait.wire import ChannelDocument
from plait_client.registry import RegistryClient
from plait_trainer import Publisher, PublishingLoop
from tests.trainer_agent.registry_process import RegistryProcess
from tests.trainer_agent.tiny_models import Run


@pytest.fixture
def run(client: RegistryClient, policy: str) -> Run:
    """Whose weights are version 1."""
    run = Run()
    with Publisher(run.model, client=client, policy=policy) as publisher:
        publisher.publish()
    return run


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seq", "1"), ("seq", True), ("seq", -20), ("seq", 1.0), ("version_digest", "1"),
        ("version_digest", None), ("layout_digest", 3), ("fingerprint", "plait"),
        ("changes_digest", "sha256:0"), ("changes", None), ("changes", [1]),
    ],
)  # fmt: skip
def test_a_field_that_was_tampered_with_is_refused(
    client: RegistryClient, policy: str, run: Run, field: str, value: object
) -> None:
    with Publisher(run.model, client=client, policy=policy) as publisher:
        state = {**publisher.state_dict(), field: value}
    publisher = Publisher(run.model, client=client, policy=policy, attach=False)
    with publisher:
        with pytest.raises(FormatError):
            publisher.load_state_dict(state)
        assert publisher.version is None
        publisher.attach()
    assert client.version(policy, "main").seq == 1


@pytest.mark.parametrize("state", [None, [], "state", 3, {}, {"format": "plait-trainer/1"}])
def test_what_is_no_state_is_told_so(
    client: RegistryClient, policy: str, run: Run, state: Any
) -> None:
    with (
        Publisher(run.model, client=client, policy=policy, attach=False) as publisher,
        pytest.raises(UsageError),
    ):
        publisher.load_state_dict(state)


@pytest.mark.parametrize("change", [{"steps": -1}, {"steps": "1"}, {"steps": True}, {"steps": 1.5}])
def test_a_loop_s_count_is_a_number(
    client: RegistryClient, policy: str, run: Run, change: dict[str, object]
) -> None:
    with PublishingLoop(run.model, policy=policy, client=client) as loop:
        state = {**loop.state_dict(), **change}
    with pytest.raises(PlaitError) as refused:
        PublishingLoop(run.model, policy=policy, client=client, state=state)
    assert isinstance(refused.value, UsageError | FormatError)


@pytest.mark.parametrize("lacking", ["steps", "publisher"])
def test_a_loop_s_state_is_whole(
    client: RegistryClient, policy: str, run: Run, lacking: str
) -> None:
    with PublishingLoop(run.model, policy=policy, client=client) as loop:
        state = loop.state_dict()
    del state[lacking]
    with pytest.raises(UsageError, match=lacking):
        PublishingLoop(run.model, policy=policy, client=client, state=state)


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "4", None])
def test_every_is_a_whole_number(client: RegistryClient, policy: str, every: Any) -> None:
    with pytest.raises(UsageError, match="every"):
        PublishingLoop(Run().model, policy=policy, client=client, every=every)


class AwayAtFirst(RegistryClient):
    """A registry that is away for a question or two."""

    away = 0

    def channel(self, policy: str, channel: str, **options: Any) -> ChannelDocument:
        if self.away:
            self.away -= 1
            raise RegistryUnavailable("no answer")
        return super().channel(policy, channel, **options)


def test_attaching_waits_for_a_registry_that_is_away(
    shared_registry: RegistryProcess, policy: str, run: Run
) -> None:
    with AwayAtFirst(shared_registry.url) as client:
        client.away = 2
        with Publisher(run.model, client=client, policy=policy) as publisher:
            assert publisher.holds_version
            client.away = 1
            publisher.rebase("1")
        assert client.away == 0
        client.away = 2
        with pytest.raises(RegistryUnavailable):
            Publisher(run.model, client=client, policy=policy, patience=0.0)
        assert client.away == 1
