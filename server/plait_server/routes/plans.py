"""Plans: the cheapest way from what a caller holds to a version."""

from fastapi import APIRouter

from plait.lineage import parse_ref
from plait.wire import PlanDocument, PlanRequest
from plait_server.registry import RegistryDep
from plait_server.routes.parameters import PolicyPath

router = APIRouter(prefix="/policies/{policy}/plan", tags=["plans"])


@router.post("", summary="I hold this; take me there")
def make_plan(policy: PolicyPath, body: PlanRequest, registry: RegistryDep) -> PlanDocument:
    """The chain of forward deltas, reverse deltas or an anchor with the fewest bytes.

    Refused with 409: `unknown_base` (weights of no version), `fingerprint_mismatch` (the named
    version has other weights), `layout_changed` (needs an anchor, and none is stored), `no_plan`.
    Changes nothing.
    """
    plan = registry.planner.plan(policy, parse_ref(body.to), body)
    registry.metrics.plan_bytes.observe(plan.total_bytes)
    return plan
