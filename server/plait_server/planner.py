"""Plans: the cheapest chain from what a caller holds to where it wants to be.

Pure but for what it asks of the catalog. Blocks; routes call it in threads.
"""

from collections.abc import Mapping

from plait.errors import DocumentInvalid, FingerprintMismatch, LayoutChanged, NoPlan, UnknownBase
from plait.limits import PLAN_STEPS_MAX
from plait.lineage import Lineage, Ref, State, Step
from plait.wire import HeldState, PlanChunk, PlanDocument, PlanRequest, PlanStep
from plait_server.catalog import Catalog, ManifestChunks, Resolved, StoredChunk
from plait_server.documents import Documents


class Planner:
    """Answers "I hold this; take me there"."""

    def __init__(self, catalog: Catalog, documents: Documents) -> None:
        self._catalog = catalog
        self._documents = documents

    def plan(self, policy: str, to: Ref, request: PlanRequest) -> PlanDocument:
        """The cheapest plan in bytes.

        Raises:
            NotFound: no such version.
            FingerprintMismatch: the caller's seq is recorded with other weights.
            UnknownBase: no version of the policy has the caller's weights.
            LayoutChanged: the target has another layout, and no stored anchor.
            NoPlan: no chain of stored manifests leads there.
        """
        resolved = self._catalog.resolve(policy, to)
        lineage = self._catalog.lineage(policy)
        target = State(resolved.version.layout_digest, resolved.version.fingerprint)
        base = None
        if request.held is not None:
            base = State(request.held.layout_digest, request.held.fingerprint)
            _check_seq(request.held, base, lineage)
        steps = None
        if base is None or base in lineage.versions:
            steps = lineage.cheapest(
                base,
                target,
                allow_external=request.allow_external,
                allow_anchor=request.allow_anchor,
            )
        if steps is None:
            raise self._refusal(policy, base, target, lineage)
        if len(steps) > PLAN_STEPS_MAX:
            raise NoPlan(
                f"the cheapest plan has {len(steps)} steps; at most {PLAN_STEPS_MAX}",
                remedy="publish an anchor nearer to the target",
            )
        return self._document(resolved, lineage, steps)

    def _refusal(
        self, policy: str, base: State | None, target: State, lineage: Lineage
    ) -> Exception:
        if base is None:
            return NoPlan(
                f"no stored anchor leads to {target.fingerprint}",
                remedy="its line begins at an external anchor: hold its base model and say so",
            )
        if base.layout != target.layout:
            return self._layout_changed(base, target)
        if base not in lineage.versions:
            return UnknownBase(
                f"no version of policy {policy!r} has the weights {base.fingerprint}",
                remedy="plan from nothing: the weights at hand can't be patched",
            )
        return NoPlan(f"no chain leads from {base.fingerprint} to {target.fingerprint}")

    def _layout_changed(self, base: State, target: State) -> Exception:
        """Names the tensors that differ where both layouts are known."""
        try:
            held = self._documents.layout(base.layout)
            held.require_equal(self._documents.layout(target.layout), what="the target")
        except LayoutChanged as changed:
            return changed
        except DocumentInvalid:
            pass  # a layout that was never sent here: its digest is all there is to say
        return LayoutChanged(
            f"the weights at hand have layout {base.layout}, the target {target.layout}, and no "
            "stored anchor leads there",
            expected=target.layout,
            found=base.layout,
        )

    def _document(self, resolved: Resolved, lineage: Lineage, steps: list[Step]) -> PlanDocument:
        version, channel = resolved.version, resolved.channel
        stored = self._catalog.manifest_chunks({step.edge.manifest for step in steps})
        rows = [_plan_step(step, lineage, stored) for step in steps]
        if rows:
            rows[-1] = rows[-1].model_copy(update={"to_seq": version.seq})
        return PlanDocument(
            policy=version.policy,
            seq=version.seq,
            version_digest=version.version_digest,
            layout_digest=version.layout_digest,
            fingerprint=version.fingerprint,
            channel=None if channel is None else channel.channel,
            generation=None if channel is None else channel.generation,
            epoch=self._catalog.epoch,
            steps=rows,
            total_bytes=sum(row.bytes for row in rows),
        )


def _check_seq(held: HeldState, base: State, lineage: Lineage) -> None:
    """A caller that names a version must hold what is recorded for it."""
    if held.seq is None:
        return
    recorded = lineage.states.get(held.seq)
    if recorded != base and (recorded is not None or base in lineage.versions):
        found = "not a version" if recorded is None else f"recorded as {recorded.fingerprint}"
        raise FingerprintMismatch(
            f"the caller holds {base.fingerprint} as version {held.seq}, which is {found}",
            remedy="the replica isn't what it thinks it is: plan from nothing",
            expected=None if recorded is None else recorded.fingerprint,
            found=base.fingerprint,
        )


def _plan_step(step: Step, lineage: Lineage, stored: Mapping[str, ManifestChunks]) -> PlanStep:
    objects = stored[step.edge.manifest]
    return PlanStep(
        kind=step.kind,
        manifest_digest=step.edge.manifest,
        layout_digest=step.target.layout,
        cut_digest=objects.cut_digest,
        base=None if step.base is None else step.base.fingerprint,
        target=step.target.fingerprint,
        to_seq=lineage.versions[step.target][-1],
        chunks=[_plan_chunk(chunk) for chunk in objects.chunks],
        side_files=[_plan_chunk(chunk) for chunk in objects.side_files],
        bytes=step.edge.cost,
    )


def _plan_chunk(chunk: StoredChunk) -> PlanChunk:
    return PlanChunk(digest=chunk.digest, size=chunk.size, key=chunk.key)
