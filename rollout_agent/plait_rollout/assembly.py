"""From what an operator says to the replica that is meant."""

import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

from plait.errors import NotInstalledError, UsageError
from plait.limits import NAME_BYTES_MAX
from plait_client.cache import default_cache_root
from plait_client.checkpoint import CheckpointFolder
from plait_client.fetch import Fetcher
from plait_client.progress import Progress
from plait_rollout.directory import DirectoryReplica
from plait_rollout.in_place import InPlaceReplica
from plait_rollout.reload import ReloadReplica
from plait_rollout.replica import Replica
from plait_rollout.source import DeltaSource

Mode = Literal["in-place", "reload"]

_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class Target:
    """What shall follow: an engine, or a directory.

    Attributes:
        engine: address of an SGLang server on this host.
        mode: how its weights are moved.
        spool: folder that this process and the engine share; the engine was started with it as
            PLAIT_SPOOL. In place it is needed; a reload keeps its checkout in it.
        directory: instead of an engine.
        base: checkpoint folder to begin with, where the line's anchor is external.
        reloads: in place, whether what deltas can't do may be done by a reload.

    Raises:
        UsageError: not exactly one of engine and directory, or in place without a spool.
    """

    engine: str | None = None
    mode: Mode = "in-place"
    spool: Path | None = None
    directory: Path | None = None
    base: Path | None = None
    reloads: bool = True

    def __post_init__(self) -> None:
        if (self.engine is None) == (self.directory is None):
            raise UsageError("follow with an engine or with a directory: --engine URL or --dir DIR")
        if self.engine is not None and self.mode == "in-place" and self.spool is None:
            raise UsageError(
                "moving an engine in place needs --spool DIR",
                remedy="start the engine with PLAIT_SPOOL=DIR, and name the same folder here",
            )

    @property
    def name(self) -> str:
        """A name for the fleet: this host and what tells its replicas apart."""
        what = "dir" if self.directory is None else self.directory.resolve().name
        if self.engine is not None:
            what = str(urlsplit(self.engine).port or "engine")
        name = _NOT_IN_NAMES.sub("-", f"{socket.gethostname()}-{what}").strip("-._")
        return name[:NAME_BYTES_MAX]


def replica_of(target: Target, fetcher: Fetcher, *, progress: Progress) -> Replica:
    """The replica that a target stands for; nothing is attached or written yet."""
    if target.directory is not None:
        return DirectoryReplica(target.directory, fetcher, base=target.base, progress=progress)
    # The engines' adapters are imported only where one is driven: they need torch.
    try:
        from plait_rollout.sglang.adapter import SglangEngine
        from plait_rollout.sglang.reload import ReloadEngine
    except ModuleNotFoundError as error:
        raise NotInstalledError(
            f"driving an engine needs {error.name}", remedy="pip install 'plait[rollout]'"
        ) from error
    assert target.engine is not None
    folder = (target.spool or default_cache_root() / "follow" / target.name) / "reload"
    directory = DirectoryReplica(folder, fetcher, base=target.base, progress=progress)
    reload = ReloadReplica(directory, ReloadEngine(target.engine))
    if target.mode == "reload":
        return reload
    assert target.spool is not None
    unheld = None if target.base is None else CheckpointFolder(target.base)
    engine = SglangEngine(target.engine, spool=target.spool, holder_of_unheld=unheld)
    source = DeltaSource(fetcher, progress=progress)
    return InPlaceReplica(engine, source, reload=reload if target.reloads else None)
