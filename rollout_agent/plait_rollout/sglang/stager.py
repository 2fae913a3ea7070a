"""The stager: one daemon thread in each rank, which answers what needs no pause.

SGLang's update call waits for running requests; the spool doesn't. The thread looks into
SPOOL/rank-N for request files, answers them one by one while the engine generates, and writes
nothing into a parameter.
"""

import contextlib
import logging
import threading
import time
from pathlib import Path

import torch

from plait_rollout.sglang.hook import report
from plait_rollout.sglang.rank import Rank

# What an idle engine pays: one directory read in this time.
_LOOK_SECONDS = 0.02

_log = logging.getLogger("plait.engine")


def start(rank: Rank) -> threading.Thread:
    """Starts the thread. Requests left over from an earlier engine are dropped."""
    inbox = rank.spool.inbox(rank.place.rank)
    for path in inbox.glob("*.json"):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
    thread = threading.Thread(target=_serve, args=(rank, inbox), name="plait-stager", daemon=True)
    thread.start()
    return thread


def _serve(rank: Rank, inbox: Path) -> None:
    with _own_stream():
        while True:
            paths = sorted(inbox.glob("*.json"))
            for path in paths:
                _answer(rank, path)
            if not paths:
                time.sleep(_LOOK_SECONDS)


def _answer(rank: Rank, path: Path) -> None:
    try:
        report(rank, path, lambda rank, request: rank.answer(request))
    except Exception:  # noqa: BLE001 - the thread outlives a full disk; the adapter misses a report
        _log.exception("plait's stager could not report on %s", path.stem)
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _own_stream() -> contextlib.AbstractContextManager[object]:
    """Reads beside the engine's own work where the device has streams."""
    if not torch.accelerator.is_available():
        return contextlib.nullcontext()
    stream: contextlib.AbstractContextManager[object] = torch.Stream()
    return stream
