"""Where a replica's deltas come from: plans of the registry, fetched and checked."""

from collections.abc import Iterator, Sequence

from plait.errors import DocumentInvalid, FingerprintMismatch
from plait.fingerprint import Fingerprint
from plait.layout import Layout
from plait.wire import HeldState, PlanDocument
from plait_client.fetch import FetchedStep, Fetcher
from plait_client.plans import check_plan
from plait_client.progress import SILENT, Progress
from plait_rollout.engine import Move, MoveStep
from plait_rollout.goal import Goal, Held, stamp_of


class DeltaSource:
    """Plans and fetches chains of deltas.

    Args:
        fetcher: of the registry that has the policy.
        progress: told of every fetched byte.
    """

    def __init__(self, fetcher: Fetcher, *, progress: Progress = SILENT) -> None:
        self.fetcher = fetcher
        self._progress = progress

    def plan(self, held: Held, goal: Goal) -> PlanDocument:
        """The way from what is held to the goal, by deltas only.

        Raises:
            UnknownBase: no version of the policy has the weights that are held.
            NoPlan: no chain of deltas leads there. An anchor may, but none can be applied in place.
            LayoutChanged: the goal's layout is another one.
            FingerprintMismatch: the plan leads elsewhere.
            DocumentInvalid: its steps don't lead there.
        """
        state = HeldState(layout_digest=held.layout_digest, fingerprint=str(held.fingerprint))
        plan = self.fetcher.client.plan(goal.policy, state, str(goal.seq), allow_anchor=False)
        if plan.fingerprint != str(goal.fingerprint) or plan.layout_digest != goal.layout_digest:
            raise FingerprintMismatch(
                f"the plan leads to {plan.fingerprint}, version {goal.seq} is {goal.fingerprint}",
                expected=str(goal.fingerprint),
                found=plan.fingerprint,
            )
        check_plan(plan, state)
        if any(step.kind not in ("forward", "reverse") for step in plan.steps):
            raise DocumentInvalid(f"the plan for version {goal.seq} isn't made of deltas alone")
        return plan

    def fetch(self, plan: PlanDocument) -> list[FetchedStep]:
        """Everything that the plan takes, verified, on this disk. Errors as Fetcher.fetch_step."""
        self._progress.begin(f"fetching version {plan.seq}", plan.total_bytes)
        return [self.fetcher.fetch_step(step, self._progress) for step in plan.steps]


def moves_of(
    fetched: Sequence[FetchedStep], layout: Layout, base: Fingerprint, goal: Goal
) -> Iterator[Move]:
    """A chain as moves of one cut each, as few as there are changes of cut; at least one.

    Args:
        base: the state before the first step.
    """
    groups: list[list[FetchedStep]] = [[]]
    for step in fetched:
        cuts = {held.cut.digest for held in groups[-1] if held.cut is not None}
        if step.cut is not None and cuts - {step.cut.digest}:
            groups.append([])
        groups[-1].append(step)
    for number, group in enumerate(groups):
        steps = [_move_step(step) for step in group]
        last = number == len(groups) - 1
        seq = goal.seq if last else group[-1].step.to_seq
        target = steps[-1].target if steps else base
        yield Move(
            layout=layout,
            cut=next((step.cut for step in group if step.cut is not None), None),
            base=base,
            target=target,
            steps=steps,
            stamp=stamp_of(goal.policy, seq, goal.generation),
        )
        base = target


def _move_step(fetched: FetchedStep) -> MoveStep:
    reverse = fetched.step.kind == "reverse"
    return MoveStep(fetched.manifest, "reverse" if reverse else "forward", fetched.paths)
