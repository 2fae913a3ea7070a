"""Publishing from a plain training loop: every K-th step, the first and the last state included."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

import torch

from plait.errors import HeadMoved, PlaitError, UsageError
from plait.fields import parse_integer
from plait.limits import INTEGER_MAX
from plait_client.connection import connected
from plait_client.registry import RegistryClient
from plait_trainer.future import PublishFuture
from plait_trainer.live import TensorSource
from plait_trainer.options import check_whole
from plait_trainer.publisher import Publisher
from plait_trainer.remedies import beginning_a_loop, told
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
        rebase: go on from the version that the weights are (with a state: or come from) even if the
            channel has gone on, or was moved back, meanwhile: the next version is a child of that
            one. Otherwise that is refused. See `Publisher.rebase`.
        options: of the `Publisher`.

    Raises:
        UsageError: `every` isn't a whole number of at least 1, or the state is none of a loop.
        HeadMoved: the weights are or come from a version that isn't the head, without `rebase`.
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
        rebase: bool = False,
        **options: Any,
    ) -> None:
        self._every = check_whole(every, "every")
        saved = None if state is None else _Saved.read(state)
        with ExitStack() as held:
            used = held.enter_context(connected()) if client is None else client
            attach = options.pop("attach", True) or saved is not None
            self.publisher = Publisher(
                model, optimizer, client=used, policy=policy, attach=False, **options
            )
            if attach:
                _take_up(self.publisher, saved, rebase=rebase)
            self._held = held.pop_all()
        self.steps = 0 if saved is None else saved.steps
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


@dataclass(frozen=True)
class _Saved:
    """A loop's state: the count, and the publisher's."""

    steps: int
    publisher: Mapping[str, Any]

    @classmethod
    def read(cls, state: object) -> "_Saved":
        """
        Raises:
            UsageError: it is none of a loop.
            FormatError: its count is damaged.
        """
        if not isinstance(state, Mapping):
            raise UsageError(f"a loop's state is a mapping, got {type(state).__name__}")
        if missing := {"steps", "publisher"} - set(state):
            raise UsageError(f"a loop's state lacks {', '.join(sorted(missing))}")
        return cls(
            parse_integer(state["steps"], "a count of steps", INTEGER_MAX), state["publisher"]
        )


def _take_up(publisher: Publisher, saved: _Saved | None, *, rebase: bool) -> None:
    """Finds out where the weights at hand stand; closes the publisher if they stand nowhere."""
    try:
        with told(beginning_a_loop):
            _attach(publisher, saved, rebase=rebase)
    except BaseException:
        publisher.close(abandon=True)
        raise


def _attach(publisher: Publisher, saved: _Saved | None, *, rebase: bool) -> None:
    try:
        if saved is None:
            publisher.attach()
        else:
            publisher.load_state_dict(saved.publisher)
    except HeadMoved as moved:
        if not rebase:
            raise
        # The publisher still has the state, whose changes since that version are the next publish.
        publisher.rebase(to=moved.details["held"])
