"""The reload path: SGLang reads a whole checkpoint from a directory.

For engines that can't be moved in place. SGLang writes tensor by tensor, and its own way back after
a failure reads the *new* path again, so a checkpoint that doesn't fit ends the engine or leaves it
torn. Hence: the caller proves the directory first, other tensors are refused before the engine is
asked, and what failed half-way is never resumed.
"""

import time
from pathlib import Path
from typing import Final

from plait.errors import EngineRefused, LayoutChanged, ReplicaUnproven
from plait_client.checkpoint import CheckpointFolder
from plait_rollout.engine import ApplyReport
from plait_rollout.sglang.http import SglangApi

# What SGLang says when it failed before the first write.
_UNTOUCHED: Final = ("Failed to get weights iterator", "Failed to get model loader")


class ReloadEngine:
    """One SGLang engine that loads directories. Implements `DirectoryLoader`.

    Args:
        url: of the engine's HTTP server; it must see the same paths.
        timeout_seconds: for one load.
    """

    def __init__(self, url: str, *, timeout_seconds: float = 1800.0) -> None:
        self._api = SglangApi(url, timeout_seconds=timeout_seconds)

    def load_directory(self, path: Path, stamp: str) -> ApplyReport:
        """Replaces all weights with generation paused; stamps only after it succeeded.

        Raises:
            EngineRefused: nothing was written; the old version is served on.
            EngineUnavailable: not answering; unknown what it holds.
            ReplicaUnproven: it failed while writing; the engine stays paused.
        """
        self._check_fits(path)
        started = time.perf_counter()
        self._api.pause("retract")
        try:
            self._api.update_from_disk(str(path.resolve()))
        except EngineRefused as error:
            if not any(message in error.message for message in _UNTOUCHED):
                raise ReplicaUnproven(
                    f"loading {path} failed half-way: {error.message}; the engine stays paused",
                    remedy="load another version, or restart the engine",
                ) from error
            self._api.resume()
            raise
        loaded = time.perf_counter()
        self._api.set_weight_version(stamp)
        self._api.resume()
        return ApplyReport(time.perf_counter() - started, loaded - started)

    def version(self) -> str:
        return self._api.weight_version()

    def close(self) -> None:
        self._api.close()

    def _check_fits(self, path: Path) -> None:
        """Compares the tensors with those of the folder that the engine was started from, where
        that can be seen from here (the engine may have been started from a hub's name)."""
        started_from = Path(str(self._api.server_info().get("model_path", "")))
        if not started_from.is_dir():
            return
        try:
            CheckpointFolder(started_from).layout.require_equal(
                CheckpointFolder(path).layout, what=str(path)
            )
        except LayoutChanged as error:
            raise EngineRefused(
                f"the engine's model doesn't take {path}: {error.message}",
                remedy="restart the engine on the new checkpoint",
                **error.details,
            ) from error
