"""The custom weight loader that SGLang calls inside every scheduler process.

Start the engine with `--custom-weight-loader plait_rollout.sglang.hook.load` and `PLAIT_SPOOL` set.
An update request then carries one uint8 tensor: the path of a request file in the spool.

An exception that leaves a loader kills the engine, so none does: this is the border where every
error becomes a report file. A report that can't be written is the only loss, and the adapter takes
a missing report for what it is, an unknown state.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plait.errors import DocumentInvalid, EngineRefused, PlaitError
from plait_rollout.sglang.model import place
from plait_rollout.sglang.rank import Rank
from plait_rollout.sglang.spool import (
    Spool,
    error_document,
    read_json,
    spool_from_environment,
    write_json,
)

_log = logging.getLogger("plait.engine")


class _Process:
    """What lives as long as the scheduler process: its rank and its stager thread."""

    def __init__(self) -> None:
        # Fixed at the engine's start: nothing that arrives later can move it.
        self.spool: Spool = spool_from_environment()
        self.rank: Rank | None = None
        self.stager: threading.Thread | None = None

    def attached(self) -> Rank:
        """The rank, made at the first request; its stager thread runs from then on.

        Raises:
            EngineRefused: the spool is another living engine's.
        """
        from plait_rollout.sglang import stager

        if self.rank is None:
            self.rank = Rank(self.spool)
        if self.stager is None or not self.stager.is_alive():
            self.stager = stager.start(self.rank)
        return self.rank


_process: _Process | None = None


def load(model: nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Answers one request. Never raises."""
    global _process
    try:
        if _process is None:
            _process = _Process()
        process = _process
        path = _requested(process.spool, named_tensors)
        if path is None:
            _refuse(process.spool, named_tensors)
            return
        try:
            rank = process.attached()
        except PlaitError as error:
            head = {"rank": place().rank, "world": place().world, "boot": ""}
            answer = {**head, "error": error_document(error)}
            write_json(process.spool.report(path.stem, place().rank), answer)
            return
        report(rank, path, lambda rank, request: _answer(rank, request, model))
    except BaseException:  # noqa: BLE001 - see the module's docstring
        with contextlib.suppress(BaseException):
            _log.exception("plait's loader failed before it could write a report")


def report(
    rank: Rank, path: Path, answer: Callable[[Rank, dict[str, Any]], dict[str, Any]]
) -> None:
    """Reads a request file, has it answered and writes the report, whatever happens."""
    head = {"rank": rank.place.rank, "world": rank.place.world, "boot": rank.boot}
    try:
        request = read_json(path)
        if request.get("id") != path.stem:
            raise DocumentInvalid(f"request {path.name} calls itself {request.get('id')!r:.80}")
        body = {**head, "error": None, **answer(rank, request)}
    except BaseException as error:  # noqa: BLE001 - becomes the report
        body = {**head, "error": error_document(error)}
        _log.warning("plait request %s: %s", path.stem, body["error"]["message"])
    write_json(rank.spool.report(path.stem, rank.place.rank), body)


def _answer(rank: Rank, request: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    if request.get("kind") == "detach":
        rank.detach()
        return {}
    return rank.answer(request, model)


def _requested(spool: Spool, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> Path | None:
    """The request file that an update names, or None if it isn't one of this spool."""
    path = Path(_text(named_tensors))
    try:
        inside = path.resolve().parent == spool.requests and path == spool.request(path.stem)
    except (OSError, ValueError, DocumentInvalid):
        return None
    return path if inside else None


def _text(named_tensors: Sequence[tuple[str, torch.Tensor]]) -> str:
    (name, tensor), *others = named_tensors
    if name != "request" or others or tensor.dtype != torch.uint8 or tensor.numel() > 4096:
        return ""
    with contextlib.suppress(UnicodeDecodeError):
        return bytes(tensor.cpu().tolist()).decode()
    return ""


def _refuse(spool: Spool, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Leaves word of an update that asked for anything else than a request of this spool."""
    refusal = EngineRefused(
        f"the update names {_text(named_tensors)!r}, which is no request in {spool.requests}"
    )
    path = spool.reports / f"refused.rank-{place().rank}.json"
    write_json(path, {"error": error_document(refusal)})
