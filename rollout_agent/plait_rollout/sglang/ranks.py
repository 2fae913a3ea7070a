"""Asking all ranks of an engine: through the update hook, or through their stager threads."""

import contextlib
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from plait.errors import EngineRefused, EngineUnavailable, PlaitError
from plait_rollout.sglang.http import SglangApi
from plait_rollout.sglang.spool import Spool, error_from, is_locked, read_json, write_json

LOADER: Final = "plait_rollout.sglang.hook.load"

Report = dict[str, Any]

_LOOK_SECONDS: Final = 0.005


class Ranks:
    """The ranks behind one engine.

    Attributes:
        boots: the ranks' process names, known since `attach`; a report of any other is refused.
    """

    def __init__(
        self, api: SglangApi, spool: Spool, *, tp: int, world: int, timeout_seconds: float
    ) -> None:
        self._api = api
        self._spool = spool
        self._tp = tp
        self._timeout = timeout_seconds
        self.world = world
        self.boots: tuple[str, ...] | None = None

    def through_hook(
        self, kind: str, *, flush_cache: bool, shared: Sequence[Any] = (), **fields: Any
    ) -> list[Report]:
        """One update call; the engine should be paused. Reports of all ranks, in their order.

        Raises:
            EngineUnavailable: a report is missing, or comes from another process.
            PlaitError: what a rank reported.
        """
        request_id = uuid.uuid4().hex
        path = self._spool.request(request_id)
        body = {"id": request_id, "kind": kind, "shared_of": _shared_rows(shared), **fields}
        write_json(path, body)
        try:
            self._api.update_from_tensor(
                LOADER, str(path).encode(), ranks=self._tp, flush_cache=flush_cache
            )
            paths = [self._spool.report(request_id, rank) for rank in range(self.world)]
            if missing := [path.name for path in paths if not path.exists()]:
                raise EngineUnavailable(
                    f"the engine left no report {missing}",
                    remedy="start it with PLAIT_SPOOL naming this agent's spool",
                )
            return self._checked(paths)
        finally:
            path.unlink(missing_ok=True)

    def through_stager(
        self, kind: str, *, shared: Sequence[Any] = (), **fields: Any
    ) -> list[Report]:
        """Asks the stager threads, which answer beside the running generation.

        Raises: as `through_hook`.
        """
        request_id = uuid.uuid4().hex
        body = {"id": request_id, "kind": kind, "shared_of": _shared_rows(shared), **fields}
        paths = []
        for rank in range(self.world):
            write_json(self._spool.inbox(rank) / f"{request_id}.json", body)
            paths.append(self._spool.report(request_id, rank))
        deadline = time.monotonic() + self._timeout
        while missing := [rank for rank, path in enumerate(paths) if not path.exists()]:
            # A rank that died just now may have reported just before.
            dead = [rank for rank in missing if not is_locked(self._spool.life(rank))]
            if any(not paths[rank].exists() for rank in dead):
                raise EngineUnavailable(f"ranks {dead} of the engine have ended")
            if time.monotonic() > deadline:
                raise EngineUnavailable(
                    f"ranks {missing} didn't answer {kind!r} within {self._timeout:.0f} s"
                )
            time.sleep(_LOOK_SECONDS)
        return self._checked(paths)

    def _checked(self, paths: Sequence[Path]) -> list[Report]:
        reports = [read_json(path) for path in paths]
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        boots = tuple(str(report["boot"]) for report in reports)
        if self.boots is not None and boots != self.boots:
            raise EngineUnavailable("the engine was restarted", remedy="attach again")
        errors = [error_from(report["error"]) for report in reports if report["error"]]
        if errors:
            raise _first(errors)
        self.boots = boots
        return reports


def _first(errors: Sequence[PlaitError]) -> PlaitError:
    """The one to tell: what is wrong with the input comes before a plain refusal."""
    return min(errors, key=lambda error: isinstance(error, EngineRefused))


def _shared_rows(shared: Sequence[Any]) -> list[list[int]]:
    return [sorted(pieces) for pieces in shared]
