"""Plans as the registry gives them: asked for, and checked before anybody follows them."""

from plait.errors import DocumentInvalid, NoPlan
from plait.wire import HeldState, PlanDocument
from plait_client.registry import RegistryClient


def plan_stored(
    client: RegistryClient, policy: str, to: str, held: HeldState | None = None
) -> PlanDocument:
    """The cheapest plan for a caller that has no external anchor's weights beside `held`.

    One that begins at an external anchor comes only where nothing else leads there.

    Raises:
        DocumentInvalid: see `check_plan`.
    """
    try:
        plan = client.plan(policy, held, to, allow_external=False)
    except NoPlan:
        if held is not None:
            raise
        plan = client.plan(policy, None, to)
    check_plan(plan, held)
    return plan


def check_plan(plan: PlanDocument, held: HeldState | None) -> None:
    """A plan is a claim: its steps must lead from what is held to the version that it names.

    Raises:
        DocumentInvalid: they don't.
    """
    reached = None if held is None else (held.layout_digest, held.fingerprint)
    for number, step in enumerate(plan.steps):
        base = None if step.base is None else (step.layout_digest, step.base)
        if base != reached and not (number == 0 and base is None):
            raise _refused(plan, f"step {number + 1} leaves {base}, but {reached} is reached")
        reached = (step.layout_digest, step.target)
    if reached != (plan.layout_digest, plan.fingerprint):
        raise _refused(
            plan, f"it leads to {reached}, expected {plan.layout_digest}, {plan.fingerprint}"
        )


def _refused(plan: PlanDocument, why: str) -> DocumentInvalid:
    return DocumentInvalid(
        f"the registry's plan for {plan.policy}@{plan.seq} contradicts itself: {why}",
        remedy="ask again; if it stays, the registry and this client don't belong together",
    )
