"""One rank's side of a replica: what it does for each kind of request."""

import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, BinaryIO

from torch import nn

from plait.canonical import digest_of
from plait.cut import Cut
from plait.errors import DigestMismatch, EngineRefused, FormatError
from plait.layout import Layout
from plait.manifest import Manifest
from plait_rollout.sglang import model as engine_model
from plait_rollout.sglang.chain import Step, added_up, check_chain
from plait_rollout.sglang.holder import Holder, Staged
from plait_rollout.sglang.recorder import live_tensors, record_map
from plait_rollout.sglang.spool import Spool, hold_lock

Answer = dict[str, Any]


class Rank:
    """State of this scheduler process. Two threads use it, one request at a time.

    Attributes:
        boot: names this process; a report of another boot is of another engine.
    """

    def __init__(self, spool: Spool) -> None:
        self.boot = uuid.uuid4().hex
        self.spool = spool
        self.place = engine_model.place()
        self._life = self._claim()
        self._busy = threading.Lock()
        self._holder: Holder | None = None
        self._staged: tuple[str, Staged] | None = None
        self._applied: tuple[str, Staged] | None = None
        self._cut: Cut | None = None

    def answer(self, request: Answer, model: nn.Module | None = None) -> Answer:
        """Does what a request asks.

        Args:
            model: given on the scheduler's thread, whose requests may write; None on the stager's.
        Raises:
            PlaitError: of any kind; nothing was written, unless `wrote` is among the details.
        """
        writing: dict[str, Callable[[Answer], Answer]] = {"apply": self._apply, "undo": self._undo}
        reading: dict[str, Callable[[Answer], Answer]] = {
            "stage": self._stage,
            "fingerprint": self._fingerprint,
            "discard": self._discard,
        }
        kind = request.get("kind")
        if not self._busy.acquire(blocking=False):
            raise EngineRefused(f"rank {self.place.rank} is busy with another request")
        try:
            if model is not None and kind == "attach":
                return self._attach(request, model)
            table = reading if model is None else writing
            if kind not in table:
                raise EngineRefused(f"no request of kind {kind!r} is answered on this path")
            return table[str(kind)](request)
        finally:
            self._busy.release()

    def detach(self) -> None:
        """Forgets everything; the engine goes on serving."""
        self._holder = self._staged = self._applied = self._cut = None

    def _claim(self) -> BinaryIO:
        self.spool.inbox(self.place.rank).mkdir(mode=0o700, parents=True, exist_ok=True)
        life = hold_lock(self.spool.life(self.place.rank))
        if life is None:
            raise EngineRefused(
                f"another living engine has rank {self.place.rank} of this spool",
                remedy="give each engine a spool folder of its own",
            )
        return life

    def _attach(self, request: Answer, model: nn.Module) -> Answer:
        before, applied = self._holder, self._applied
        self.detach()
        engine_model.check_mappable(model)
        layout = Layout.parse(self._document(request["layout"]))
        live = live_tensors(model)
        load_weights: Any = model.load_weights
        pieces = record_map(load_weights, live, layout)
        mapped = {piece.parameter for piece in pieces}
        self._holder = Holder(layout, tuple(pieces), lambda: live_tensors(model))
        if before is not None and before.pieces == self._holder.pieces:
            # The last undo list outlives the agent that made it: a torn move may need it twice.
            self._applied = applied
        parameters = {name for name, _ in model.named_parameters()}
        return {
            "pieces": [piece.to_document() for piece in pieces],
            "unmapped": sorted(name for name in live if name in parameters and name not in mapped),
        }

    def _fingerprint(self, request: Answer) -> Answer:
        started = time.perf_counter()
        self._held().warm_up()  # an agent reads everything before its first move
        tally = self._held().fingerprint(self._shared(request))
        return {"tally": tally.to_document(), "seconds": time.perf_counter() - started}

    def _stage(self, request: Answer) -> Answer:
        started = time.perf_counter()
        self._staged = None
        holder = self._held()
        cut = self._cut_of(request["cut"], holder.layout)
        steps = [
            Step(
                Manifest.parse(self._document(row["manifest"])),
                row["direction"],
                lambda chunk: self.spool.chunk(chunk.digest),
            )
            for row in request["steps"]
        ]
        check_chain(holder.layout.digest, cut, steps)
        deltas = added_up(cut, steps, holder.wants) if cut else iter(())
        staged = holder.stage(deltas, self._shared(request))
        self._staged = (request["move"], staged)
        return {
            "before": staged.before.to_document(),
            "increment": staged.increment.to_document(),
            "seconds": time.perf_counter() - started,
        }

    def _apply(self, request: Answer) -> Answer:
        started = time.perf_counter()
        if self._staged is None or self._staged[0] != request["move"]:
            raise EngineRefused(f"move {request['move']} isn't staged on rank {self.place.rank}")
        move, staged = self._staged
        # From here on an undo of this move is possible, whatever happens in between.
        self._applied, self._staged = (move, staged), None
        after = self._held().apply(staged, self._shared(request))
        self._applied = (move, staged.undo_list())
        return {"after": after.to_document(), "seconds": time.perf_counter() - started}

    def _undo(self, request: Answer) -> Answer:
        """Writes the old bits of the last move back. May be repeated: the undo list stays until the
        next move. A rank that never began the move says what its words hold all the same."""
        started = time.perf_counter()
        held = self._applied or self._staged
        if held is None or held[0] != request["move"]:
            raise EngineRefused(
                f"rank {self.place.rank} has no undo list of move {request['move']}"
            )
        after = self._held().undo(held[1], self._shared(request))
        self._applied, self._staged = held, None
        return {"after": after.to_document(), "seconds": time.perf_counter() - started}

    def _discard(self, request: Answer) -> Answer:
        del request
        self._staged = None
        return {}

    def _held(self) -> Holder:
        if self._holder is None:
            raise EngineRefused(f"rank {self.place.rank} isn't attached", remedy="attach first")
        return self._holder

    def _shared(self, request: Answer) -> frozenset[int]:
        """Numbers of this rank's pieces that other holders have too."""
        rows = request["shared_of"]
        return frozenset(rows[self.place.rank]) if rows else frozenset()

    def _document(self, digest: str) -> bytes:
        data = self.spool.read_document(digest)
        if digest_of(data) != digest:
            raise DigestMismatch(f"the spool's document {digest} has digest {digest_of(data)}")
        return data

    def _cut_of(self, digest: str | None, layout: Layout) -> Cut | None:
        """The move's cut, checked once."""
        if digest is None:
            return None
        if self._cut is None or self._cut.digest != digest:
            cut = Cut.parse(self._document(digest))
            cut.check_against(layout)
            self._cut = cut
        if self._cut.layout_digest != layout.digest:
            raise FormatError(f"cut {digest} belongs to another layout")
        return self._cut
