"""Publishing from a plain training loop: every K-th step, the first and the last state included."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Self

import torch

from plait.errors import PlaitError, UsageError
from plait_client.connection import connected
from plait_client.registry import RegistryClient
from plait_trainer.future import PublishFuture
from plait_trainer.live import TensorSource
from plait_trainer.publisher import Publisher
from plait_trainer.sources import State


class PublishingLoop:
    """A publisher that counts optimizer steps.

        with PublishingLoop(model, optimizer, policy="toy", every=4) as loop:
            for batch in batches:
                ...
                optimizer.step()
                loop.step({"loss": loss.item()})

    On entering, the present weights are published unless they are a version already; on leaving
    without an error, whatever steps are unpublished are, and everything is committed.

    Args:
        policy: that the versions belong to.
        every: optimizer steps for one version.
        client: of the registry; by default one as the environment says (`PLAIT_URL`), closed at the
            end.
        state: of a loop that is to be continued, once the model's weights are loaded: what its
            `state_dict` gave. What it had left unpublished is published on entering.
        options: of the `Publisher`.

    Raises:
        UsageError: `every` isn't at least 1.
        PlaitError: as `Publisher` does, or `Publisher.load_state_dict`.
    """

    def __init__(
        self,
        model: torch.nn.Module | State | Callable[[], State] | TensorSource,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        policy: str,
        every: int = 1,
        client: RegistryClient | None = None,
        state: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if every < 1:
            raise UsageError(f"a version every {every} steps; expected at least 1")
        self._every = every
        with ExitStack() as held:
            used = held.enter_context(connected()) if client is None else client
            self.publisher = _publisher(
                model, optimizer, state, client=used, policy=policy, **options
            )
            self._held = held.pop_all()
        self.steps = 0 if state is None else int(state["steps"])
        self._published_at = self.steps if self.publisher.holds_version else -1

    @property
    def is_published(self) -> bool:
        """Whether the weights since the last step are published, or on their way."""
        return self._published_at == self.steps

    def step(self, metadata: Mapping[str, Any] | None = None) -> PublishFuture | None:
        """Count a step, and publish if it is the K-th.

        Args:
            metadata: training facts; the count of steps is added as `step` unless it is there.
        Returns:
            The publish, or None between two.
        Raises:
            PlaitError: as `Publisher.publish` does; the step counts, and a later publish has its
                changes.
        """
        self.steps += 1
        return self.publish(metadata) if self.steps % self._every == 0 else None

    def publish(self, metadata: Mapping[str, Any] | None = None) -> PublishFuture:
        """Publish now, whatever the count."""
        future = self.publisher.publish({"step": self.steps, **(metadata or {})})
        self._published_at = self.steps
        return future

    def count_from(self, steps: int) -> None:
        """Continue a count, of a run that was resumed."""
        self.steps, self._published_at = steps, steps if self.is_published else -1

    def state_dict(self) -> dict[str, Any]:
        """For the training's own checkpoint: the count, and the publisher's state, with what isn't
        committed. See `Publisher.state_dict`."""
        return {"steps": self.steps, "publisher": self.publisher.state_dict()}

    def begin(self, metadata: Mapping[str, Any] | None = None) -> None:
        """Publish the present weights unless they are a version, and wait for the commit."""
        if not self.is_published:
            self.publish(metadata).result()

    def finish(self, metadata: Mapping[str, Any] | None = None) -> None:
        """Publish what isn't, wait until everything is committed, and close.

        Raises:
            PlaitError: something couldn't be; it is closed all the same.
        """
        try:
            if not self.is_published:
                self.publish(metadata)
        finally:
            self.close()

    def close(self, *, abandon: bool = False) -> None:
        """Close without publishing anything more; `abandon` as in `Publisher.close`."""
        try:
            self.publisher.close(abandon=abandon)
        finally:
            self._held.close()

    def __enter__(self) -> Self:
        try:
            self.begin()
        except BaseException:
            self.close(abandon=True)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.finish()
            return
        try:
            self.close()
        except PlaitError as second:
            # The body's own error is the one to be told, and this one beside it.
            error.add_note(f"while closing the publisher: {second}")


def _publisher(
    model: torch.nn.Module | State | Callable[[], State] | TensorSource,
    optimizer: torch.optim.Optimizer | None,
    state: Mapping[str, Any] | None,
    **options: Any,
) -> Publisher:
    if state is None:
        return Publisher(model, optimizer, **options)
    if missing := {"steps", "publisher"} - set(state):
        raise UsageError(f"a loop's state lacks {', '.join(sorted(missing))}")
    publisher = Publisher(model, optimizer, **{**options, "attach": False})
    try:
        publisher.load_state_dict(state["publisher"])
    except BaseException:
        publisher.close(abandon=True)
        raise
    return publisher
