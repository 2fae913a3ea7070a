"""The Engine port over a live SGLang server, moved in place.

Staging and full re-reads go through the ranks' stager threads, beside the running generation. Only
`apply` and `undo` pause it: pause → write through the update hook → re-read → stamp → continue.
An engine whose weights aren't proven is never resumed.
"""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from plait.errors import (
    BaseMismatch,
    EngineRefused,
    EngineUnavailable,
    MapUnproven,
    PlaitError,
    ReplicaUnproven,
    UsageError,
)
from plait.fingerprint import ZERO, Fingerprint
from plait.layout import Layout
from plait.weights import Weights
from plait_rollout.engine import ApplyReport, AttachReport, Move, StageReport
from plait_rollout.sglang.chain import Step, check_chain
from plait_rollout.sglang.driver import DriverState, MoveUnderWay, claim
from plait_rollout.sglang.http import SglangApi
from plait_rollout.sglang.ownership import Ownership, ownership, total
from plait_rollout.sglang.pieces import Piece
from plait_rollout.sglang.ranks import LOADER, Ranks, Report
from plait_rollout.sglang.spool import VARIABLE, Spool, remove_old
from plait_rollout.sglang.tally import Tally
from plait_rollout.sglang.unheld import UnheldTensors


@dataclass(frozen=True, slots=True)
class _Staged:
    """A move that all holders have ready. `before`: the sum over the words that it touches."""

    move: str
    base: Fingerprint
    target: Fingerprint
    stamp: str
    before: Fingerprint


@dataclass(frozen=True, slots=True)
class _Attached:
    """What is known since attach. The agent's own holder comes after the ranks."""

    layout: Layout
    ranks: Ranks
    owned: Ownership
    unheld: UnheldTensors
    state: DriverState


class SglangEngine:
    """One live SGLang engine. Implements `plait_rollout.engine.Engine`.

    Args:
        url: of the engine's HTTP server.
        spool: the folder that the engine was started with as PLAIT_SPOOL; on the same host.
        holder_of_unheld: weights that the engine was started with, asked once, and only for
            tensors that it doesn't hold.
        timeout_seconds: for one request to the engine.
    """

    def __init__(
        self,
        url: str,
        spool: Path,
        holder_of_unheld: Weights | None = None,
        *,
        timeout_seconds: float = 600.0,
    ) -> None:
        self._api = SglangApi(url, timeout_seconds=timeout_seconds)
        self._spool = Spool(spool)
        self._source = holder_of_unheld
        self._timeout = timeout_seconds
        self._claim: BinaryIO | None = None
        self._attached: _Attached | None = None
        self._staged: _Staged | None = None
        self._last: _Staged | None = None

    def attach(self, layout: Layout) -> AttachReport:
        """See `Engine.attach`. An engine that a dead agent left in the middle of a move is taken
        back to that move's base first.

        Raises:
            EngineUnavailable, MapUnproven; EngineRefused: another agent drives it.
            ReplicaUnproven: it was left torn and can't be repaired; it stays paused.
        """
        self._attached = self._staged = self._last = None
        self._spool.prepare()
        self._claim = self._claim or claim(self._spool)
        ranks = self._ranks()
        before = DriverState.read(self._spool)
        torn = before.under_way if before else None
        for folder in (self._spool.requests, self._spool.reports, self._spool.chunks):
            remove_old(folder, set())
        self._spool.put_document(layout.digest, layout.serialize())
        if torn is None:
            # Mapping writes nothing: requests in flight keep their KV and go on afterwards.
            self._api.pause("in_place")
            try:
                reports = ranks.through_hook("attach", flush_cache=False, layout=layout.digest)
            finally:
                self._api.resume()
        else:
            self._api.pause("retract")
            self._take_back(ranks, torn.move)
            reports = ranks.through_hook("attach", flush_cache=True, layout=layout.digest)
        return self._settle(layout, ranks, reports, before)

    def fingerprint(self) -> Fingerprint:
        attached = self._require()
        return total(attached.owned, self._read_all(attached))[0]

    def stage(self, move: Move) -> StageReport:
        started = time.perf_counter()
        attached = self._require()
        self._staged = None
        attached.layout.require_equal(move.layout, what="the move")
        if move.base != attached.state.held:
            raise BaseMismatch(
                f"the move leaves {move.base}, the engine holds {attached.state.held}",
                remedy="plan from what the engine holds",
                expected=str(move.base),
                found=str(attached.state.held),
            )
        move_id = uuid.uuid4().hex
        steps = self._place(move)
        reports = attached.ranks.through_stager(
            "stage",
            shared=attached.owned.shared,
            move=move_id,
            cut=move.cut.digest if move.cut else None,
            steps=[
                {"manifest": step.manifest.digest, "direction": step.direction}
                for step in move.steps
            ],
        )
        own = attached.unheld.stage(move_id, move.cut, steps)
        try:
            before, _ = total(attached.owned, [*_tallies(reports, "before"), own.before])
            found, items = total(attached.owned, [*_tallies(reports, "increment"), own.increment])
        except ReplicaUnproven as error:
            raise BaseMismatch(str(error)) from error
        if found != move.target - move.base:
            raise BaseMismatch(
                f"on the live bits the move adds {found}, not target minus base "
                f"{move.target - move.base}: they aren't its base, or its chunks lie",
                expected=str(move.target - move.base),
                found=str(found),
            )
        self._staged = _Staged(move_id, move.base, move.target, move.stamp, before)
        return StageReport(items, time.perf_counter() - started)

    def discard(self) -> None:
        if self._staged is not None:
            self._staged = None
            self._require().ranks.through_stager("discard")

    def apply(self) -> ApplyReport:
        attached = self._require()
        staged = self._staged
        if staged is None:
            raise UsageError("no move is staged")
        self._staged = self._last = None
        old_stamp = self.version()
        attached.unheld.journal(staged.move)
        self._begin(MoveUnderWay(staged.move, staged.base, staged.target, old_stamp, staged.stamp))
        started = time.perf_counter()
        try:
            seconds = self._write(attached, staged)
            self._api.set_weight_version(staged.stamp)
        except EngineUnavailable:
            # Nobody knows what it holds. It stays paused, and `under_way` for the next attach.
            self._attached = None
            raise
        except Exception as error:
            self._back_out(attached, staged, old_stamp, error)
            raise EngineRefused(
                f"the move to {staged.stamp!r} was undone: {error}", cause=str(error)
            ) from error
        self._finish(staged.target)
        self._last = staged
        return ApplyReport(time.perf_counter() - started, seconds)

    def undo(self, stamp: str) -> ApplyReport:
        attached = self._require()
        last = self._last
        if last is None:
            raise EngineRefused("there is no applied move to undo")
        self._last = self._staged = None
        self._begin(MoveUnderWay(last.move, last.base, last.target, stamp, self.version()))
        started = time.perf_counter()
        try:
            self._api.pause("retract")
            seconds = self._write_back(attached, last)
            self._api.set_weight_version(stamp)
        except EngineUnavailable:
            self._attached = None
            raise
        except Exception as error:
            self._attached = None
            raise ReplicaUnproven(
                f"undoing {last.stamp!r} failed: {error}; the engine stays paused",
                remedy="attach again, or restart the engine",
            ) from error
        self._finish(last.base)
        return ApplyReport(time.perf_counter() - started, seconds)

    def version(self) -> str:
        return self._api.weight_version()

    def close(self) -> None:
        self._attached = self._staged = self._last = None
        self._api.close()
        if self._claim is not None:
            self._claim.close()
            self._claim = None

    # -- attaching ----------------------------------------------------------------------------

    def _ranks(self) -> Ranks:
        info = self._api.server_info()
        tp, pp = int(info.get("tp_size", 1)), int(info.get("pp_size", 1))
        for key in ("dp_size", "nnodes"):
            if int(info.get(key, 1) or 1) != 1:
                raise MapUnproven(
                    f"the engine has {key} {info[key]}: an update in place reaches one copy on "
                    "one host",
                    remedy="use the reload path",
                )
        if LOADER not in (info.get("custom_weight_loader") or ()):
            # SGLang ends itself over a loader that it doesn't know.
            raise MapUnproven(
                f"the engine was started without --custom-weight-loader {LOADER}",
                remedy=f"start it with that argument and {VARIABLE}={self._spool.root}",
            )
        return Ranks(self._api, self._spool, tp=tp, world=tp * pp, timeout_seconds=self._timeout)

    def _take_back(self, ranks: Ranks, move: str) -> None:
        """Undoes an unfinished move, where the ranks still know it. The re-read that follows
        tells what came of it."""
        try:
            ranks.through_hook("undo", flush_cache=True, move=move)
        except EngineRefused:
            return
        finally:
            ranks.boots = None

    def _settle(
        self, layout: Layout, ranks: Ranks, reports: Sequence[Report], before: DriverState | None
    ) -> AttachReport:
        maps = [tuple(map(Piece.parse, report["pieces"])) for report in reports]
        owned = ownership(layout, maps)
        assert ranks.boots is not None  # reports came in
        fresh = before is None or before.boots != ranks.boots
        unheld = UnheldTensors(layout, owned.unheld, self._spool, source=self._source, fresh=fresh)
        torn = before.under_way if before and not fresh else None
        if torn is not None:
            unheld.undo(torn.move)
        state = DriverState(ranks.boots, ZERO, torn)
        attached = _Attached(layout, ranks, owned, unheld, state)
        found, _ = total(owned, self._read_all(attached))
        if torn is not None and found == torn.target:
            # The ranks had let go of their undo lists: the move had been complete.
            unheld.apply(torn.move)
        self._attached = replace(attached, state=replace(state, held=found))
        if before is not None and before.under_way is not None:
            self._release(found, torn)
        self._finish_state(found)
        return AttachReport(found, ranks.world, owned.unheld, _notes(owned, reports))

    def _release(self, found: Fingerprint, torn: MoveUnderWay | None) -> None:
        """Lets an engine go on that was found paused, if what it holds is proven."""
        if torn is not None:
            stamps = {torn.target: torn.target_stamp, torn.base: torn.base_stamp}
            if found not in stamps:
                self._attached = None
                raise ReplicaUnproven(
                    f"a dead agent left the engine with {found}, which is neither the base nor the "
                    f"target of its move {torn.base} → {torn.target}; it stays paused",
                    remedy="restart the engine",
                )
            self._api.set_weight_version(stamps[found])
        self._api.resume()

    # -- moving -------------------------------------------------------------------------------

    def _place(self, move: Move) -> list[Step]:
        """Puts what the ranks will read into the spool."""
        for step in move.steps:
            if len(step.chunks) != len(step.manifest.chunks):
                raise UsageError(
                    f"a step has {len(step.chunks)} chunk files for {len(step.manifest.chunks)}"
                )
        if move.steps and (move.steps[0].base != move.base or move.steps[-1].target != move.target):
            raise BaseMismatch("the move's steps don't lead from its base to its target")
        steps = [
            Step(step.manifest, step.direction, lambda chunk: self._spool.chunk(chunk.digest))
            for step in move.steps
        ]
        check_chain(move.layout.digest, move.cut, steps)
        chunks = {
            chunk.digest: path
            for step in move.steps
            for chunk, path in zip(step.manifest.chunks, step.chunks, strict=True)
        }
        remove_old(self._spool.chunks, {self._spool.chunk(digest).name for digest in chunks})
        for digest, path in chunks.items():
            self._spool.put_chunk(digest, path)
        documents = {step.manifest.digest: step.manifest.data for step in move.steps}
        documents[move.layout.digest] = move.layout.serialize()
        if move.cut is not None:
            documents[move.cut.digest] = move.cut.serialize()
        remove_old(self._spool.documents, {self._spool.document(d).name for d in documents})
        for digest, data in documents.items():
            self._spool.put_document(digest, data)
        return steps

    def _write(self, attached: _Attached, staged: _Staged) -> float:
        """Pauses, writes in all holders and proves the touched words; the slowest rank's seconds.

        Raises:
            PlaitError: anything less than proof from all of them.
        """
        self._api.pause("retract")
        reports = attached.ranks.through_hook(
            "apply", flush_cache=True, shared=attached.owned.shared, move=staged.move
        )
        own = attached.unheld.apply(staged.move)
        after, _ = total(attached.owned, [*_tallies(reports, "after"), own])
        if after - staged.before != staged.target - staged.base:
            raise EngineRefused(
                f"after writing, the touched words moved by {after - staged.before}, not by "
                f"{staged.target - staged.base}"
            )
        return max(float(report["seconds"]) for report in reports)

    def _write_back(self, attached: _Attached, staged: _Staged) -> float:
        """Writes the old bits in all holders and proves the touched words.

        Raises:
            PlaitError: anything less than proof from all of them.
        """
        reports = attached.ranks.through_hook(
            "undo", flush_cache=True, shared=attached.owned.shared, move=staged.move
        )
        own = attached.unheld.undo(staged.move)
        after, _ = total(attached.owned, [*_tallies(reports, "after"), own])
        if after != staged.before:
            raise ReplicaUnproven(f"after undoing, the touched words sum to {after}")
        return max(float(report["seconds"]) for report in reports)

    def _back_out(self, attached: _Attached, staged: _Staged, stamp: str, cause: Exception) -> None:
        """Takes a failed move back, re-reads everything and lets the engine go on with its base.

        Raises:
            ReplicaUnproven: that failed; the engine stays paused.
        """
        try:
            self._write_back(attached, staged)
            found, _ = total(attached.owned, self._read_all(attached))
            if found != staged.base:
                raise ReplicaUnproven(f"the engine holds {found}, not the base {staged.base}")
            self._api.set_weight_version(stamp)
        except Exception as error:
            self._attached = None
            raise ReplicaUnproven(
                f"the move to {staged.stamp!r} failed ({cause}), and so did undoing it ({error}); "
                "the engine stays paused",
                remedy="attach again, or restart the engine",
            ) from error
        self._finish(staged.base)

    def _begin(self, move: MoveUnderWay) -> None:
        attached = self._require()
        replace(attached.state, under_way=move).write(self._spool)

    def _finish(self, held: Fingerprint) -> None:
        """The move is proven (or undone): says so for whoever comes next, then resumes."""
        self._finish_state(held)
        try:
            self._api.resume()
        except PlaitError:
            self._attached = None  # attach resumes what this couldn't
            raise

    def _finish_state(self, held: Fingerprint) -> None:
        attached = self._require()
        state = attached.state.settled(held)
        state.write(self._spool)
        self._attached = replace(attached, state=state)

    def _read_all(self, attached: _Attached) -> list[Tally]:
        reports = attached.ranks.through_stager("fingerprint", shared=attached.owned.shared)
        return [*_tallies(reports, "tally"), attached.unheld.fingerprint()]

    def _require(self) -> _Attached:
        if self._attached is None:
            raise EngineUnavailable("not attached to the engine", remedy="attach first")
        return self._attached


def _tallies(reports: Sequence[Report], field: str) -> list[Tally]:
    return [Tally.parse(report[field]) for report in reports]


def _notes(owned: Ownership, reports: Sequence[Report]) -> tuple[str, ...]:
    notes = []
    if owned.groups:
        notes.append(f"{len(owned.groups)} blocks are held by more than one rank, counted once")
    # A rank may hold nothing but padding of a small parameter: it matters if none is fed.
    unmapped = sorted(set.intersection(*(set(report["unmapped"]) for report in reports)))
    if unmapped:
        notes.append(f"parameters that no tensor of the layout feeds: {', '.join(unmapped[:8])}")
    return tuple(notes)
