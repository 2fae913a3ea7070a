"""Checkout: any version as an ordinary Hugging Face folder.

Into a new folder a version is built whole and proven before its files take their places. An
existing checkout is moved by deltas, in place: new bits go into a redo journal first, then into the
files, and are read back. Killed at any moment, the next run repairs the folder to a whole version.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from plait.errors import BaseMismatch, CorruptionError, DocumentInvalid, FormatError, NoPlan
from plait.fingerprint import Fingerprint
from plait.manifest import SideFile
from plait.weights import fingerprint_weights
from plait.wire import HeldState, PlanDocument, PlanStep
from plait_client.build import build_weights, write_side_files
from plait_client.cache import ChunkCache
from plait_client.checkout_folder import (
    CheckoutFolder,
    HeldVersion,
    open_checkout_folder,
    refuse_torn,
)
from plait_client.checkpoint import CheckpointFolder
from plait_client.disk import disk_errors
from plait_client.failpoints import failpoint
from plait_client.fetch import FetchedStep, Fetcher
from plait_client.journal import redo_records, write_journal
from plait_client.plans import plan_stored
from plait_client.progress import SILENT, Progress
from plait_client.refs import split_ref
from plait_client.registry import RegistryClient
from plait_client.shards import copy_side_file
from plait_client.steps import added_frames, groups_of

Way = Literal["built", "moved", "already there"]


@dataclass(frozen=True, slots=True)
class CheckoutResult:
    """What a checkout did.

    Attributes:
        version: that the folder holds now.
        way: whether its files were built anew, moved by deltas, or were right already.
        steps: manifests that were followed.
        fetched_bytes: what the plan asked to fetch; less came over the wire where the cache had it.
        repaired: a killed run was finished, or its unprovable remains replaced, first.
    """

    version: HeldVersion
    way: Way
    steps: int
    fetched_bytes: int
    repaired: bool


def checkout(
    client: RegistryClient,
    ref: str,
    folder: Path | str,
    *,
    base: Path | str | None = None,
    fetcher: Fetcher | None = None,
    progress: Progress | None = None,
    rebuild: bool = False,
) -> CheckoutResult:
    """Make a folder hold a version, bit for bit.

    Args:
        ref: `POLICY` or `POLICY@REF`.
        folder: new, empty, or a checkout; nothing else is written to.
        base: a checkpoint folder to begin with; an external line needs it the first time.
        fetcher: with its cache; by default one with the user's cache.
        rebuild: don't look at what the folder holds; build it anew and replace it.

    Raises:
        UsageError: the folder holds something else.
        BaseMismatch: the folder or `base` isn't what it must be; nothing was written.
        UnknownBase, LayoutChanged, NoPlan: there is no way from what lies there.
        CorruptionError, FormatError: stored bytes are damaged, or the registry contradicts itself;
            the folder is as it was, or whole at a version on the way.
        ConflictError: another run works on the folder.
        NoSpace, RegistryUnavailable, NotFound: see those classes.
    """
    policy, to = split_ref(ref)
    with open_checkout_folder(Path(folder)) as place:
        work = _Checkout(place, fetcher or Fetcher(client, ChunkCache()), progress or SILENT)
        repaired, rebuild = work.repair(rebuild=rebuild)
        result = work.run(policy, to, None if base is None else Path(base), rebuild=rebuild)
    return CheckoutResult(*result, repaired=repaired)


class _Checkout:
    """One run on one locked folder."""

    def __init__(self, place: CheckoutFolder, fetcher: Fetcher, progress: Progress) -> None:
        self._place = place
        self._fetcher = fetcher
        self._client = fetcher.client
        self._progress = progress

    def repair(self, *, rebuild: bool) -> tuple[bool, bool]:
        """(something was finished, the folder must be built anew)."""
        if rebuild:
            return False, True
        try:
            return self._place.repair(), False
        except (CorruptionError, FormatError):
            if not self._place.is_torn:
                raise
            # What was cut short can't be finished: only whole new files help.
            return True, True

    def run(
        self, policy: str, to: str, base: Path | None, *, rebuild: bool
    ) -> tuple[HeldVersion, Way, int, int]:
        held = None if rebuild else self._place.held()
        source = None
        if base is not None and held is None:
            refuse_torn(base)
            source = CheckpointFolder(base)
        state = None if held is None else held.state
        if source is not None:
            state = HeldState(
                layout_digest=source.layout.digest, fingerprint=str(fingerprint_weights(source))
            )
        plan = plan_stored(self._client, policy, to, state)
        version = HeldVersion(
            policy=plan.policy,
            seq=plan.seq,
            version_digest=plan.version_digest,
            layout_digest=plan.layout_digest,
            fingerprint=plan.fingerprint,
        )
        steps = self._fetch(plan)
        summary = (len(plan.steps), plan.total_bytes)
        if held is not None and not steps:
            self._place.stamp(version)
            return version, "already there", *summary
        if held is not None and all(s.step.kind in ("forward", "reverse") for s in steps):
            self._move(policy, steps, version)
            return version, "moved", *summary
        self._build(plan, steps, source, version)
        return version, "built", *summary

    def _fetch(self, plan: PlanDocument) -> list[FetchedStep]:
        if plan.steps and plan.steps[0].kind == "external":
            raise BaseMismatch(
                f"{plan.policy}@{plan.seq} begins with weights that the registry doesn't hold "
                f"(fingerprint {plan.steps[0].target})",
                remedy="give their folder with --base DIR",
                expected=plan.steps[0].target,
            )
        self._progress.begin("fetching", plan.total_bytes)
        return [self._fetcher.fetch_step(step, self._progress) for step in plan.steps]

    def _move(self, policy: str, steps: Sequence[FetchedStep], version: HeldVersion) -> None:
        """Move the files in place, one group of deltas at a time; each ends at a version."""
        groups = groups_of(steps)
        # All questions come before the first write.
        reached = [self._version_after(policy, group[-1].step) for group in groups[:-1]]
        for group, after in zip(groups, [*reached, version], strict=True):
            base = group[0].step.base
            assert base is not None  # deltas have one
            expected = Fingerprint.parse(group[-1].step.target) - Fingerprint.parse(base)
            # Opened as the replay will open them: files that can't be written are found now.
            weights = CheckpointFolder(self._place.path, writable=True)
            records = redo_records(weights, added_frames(group))
            with disk_errors(f"write {self._place.journal}"):
                write_journal(self._place.journal, asdict(after), records, expected=expected)
            failpoint("move.journalled")
            self._place.finish_move()

    def _version_after(self, policy: str, step: PlanStep) -> HeldVersion:
        found = self._client.version(policy, str(step.to_seq))
        if (found.layout_digest, found.fingerprint) != (step.layout_digest, step.target):
            raise DocumentInvalid(
                f"the plan calls {step.target} version {found.seq}, which has {found.fingerprint}"
            )
        return HeldVersion(
            policy, found.seq, found.version_digest, found.layout_digest, found.fingerprint
        )

    def _build(
        self,
        plan: PlanDocument,
        steps: Sequence[FetchedStep],
        source: CheckpointFolder | None,
        version: HeldVersion,
    ) -> None:
        building = self._place.start_building()
        from_anchor = bool(steps) and steps[0].step.kind == "anchor"
        build_weights(
            building,
            self._fetcher.layout(plan.layout_digest),
            steps,
            source=None if from_anchor else source,
            expected=Fingerprint.parse(plan.fingerprint),
            progress=self._progress,
        )
        side_files = steps[0].manifest.side_files if from_anchor else self._side_files(plan)
        if side_files is not None:
            write_side_files(building, side_files, self._fetcher)
        elif source is not None:
            for name, path in source.side_files():
                copy_side_file(building, name, path)
        failpoint("build.done")
        self._place.place(building, version)

    def _side_files(self, plan: PlanDocument) -> tuple[SideFile, ...] | None:
        """Of the anchor that the version stems from; None: an external one, which has none."""
        try:
            way = self._client.plan(plan.policy, None, str(plan.seq), allow_external=False)
        except NoPlan:
            return None
        first = way.steps[0] if way.steps else None
        if first is None or first.kind != "anchor":
            return None
        return self._fetcher.manifest(first.manifest_digest).side_files
