"""Followers of torch states, and engines that misbehave on purpose."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from plait.errors import MapUnproven
from plait.fingerprint import Fingerprint
from plait.layout import Layout
from plait_client.fetch import Fetcher
from plait_rollout.directory import DirectoryReplica
from plait_rollout.engine import ApplyReport, AttachReport, Engine, Move, StageReport
from plait_rollout.follower import Follower, FollowOptions
from plait_rollout.in_place import InPlaceReplica
from plait_rollout.module_loader import ModuleLoader
from plait_rollout.reload import ReloadReplica
from plait_rollout.source import DeltaSource
from plait_rollout.status import Status
from plait_rollout.torch_module import TorchModuleEngine

from .line import Line
from .states import State

# Tries soon, and polls often: tests shouldn't wait.
QUICK = FollowOptions(wait_seconds=1.0, backoff_seconds=0.05, backoff_seconds_most=0.2)


class WrappedEngine:
    """Another engine, with something done before each call."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        self.before_attach: Callable[[], None] = lambda: None
        self.before_stage: Callable[[Move], None] = lambda move: None
        self.before_apply: Callable[[], None] = lambda: None
        self.staged: list[Move] = []
        self.applied = 0

    def attach(self, layout: Layout) -> AttachReport:
        self.before_attach()
        return self.inner.attach(layout)

    def fingerprint(self) -> Fingerprint:
        return self.inner.fingerprint()

    def stage(self, move: Move) -> StageReport:
        self.before_stage(move)
        self.staged.append(move)
        return self.inner.stage(move)

    def apply(self) -> ApplyReport:
        self.before_apply()
        self.applied += 1
        return self.inner.apply()

    def discard(self) -> None:
        self.inner.discard()

    def undo(self, stamp: str) -> ApplyReport:
        return self.inner.undo(stamp)

    def version(self) -> str:
        return self.inner.version()

    def close(self) -> None:
        self.inner.close()


def refuse_to_map() -> None:
    raise MapUnproven("these parameters were transformed after loading")


def follower_of(
    fetcher: Fetcher,
    line: Line,
    engine: Engine,
    *,
    name: str = "replica",
    reload_into: Path | None = None,
    module: TorchModuleEngine | None = None,
    memory: Path | None = None,
    options: FollowOptions = QUICK,
    on_change: Callable[[Status], None] | None = None,
) -> Follower:
    """A follower of a torch engine; with `reload_into` and `module`, one that can reload it."""
    reload = None
    if reload_into is not None:
        assert module is not None
        reload = ReloadReplica(DirectoryReplica(reload_into, fetcher), ModuleLoader(module))
    return Follower(
        fetcher,
        InPlaceReplica(engine, DeltaSource(fetcher), reload=reload),
        policy=line.policy,
        channel=line.channel,
        name=name,
        memory=memory,
        options=options,
        on_change=on_change,
    )


@contextmanager
def running(follower: Follower) -> Iterator[Follower]:
    follower.start()
    try:
        yield follower
    finally:
        follower.stop()


def wrapped(live: State) -> WrappedEngine:
    return WrappedEngine(TorchModuleEngine(live))
