"""Replicas: what rollout engines say about themselves, and how the fleet is doing."""

from fastapi import APIRouter

from plait.wire import FleetDocument, ReplicaDocument, ReplicaReport
from plait_server.registry import RegistryDep
from plait_server.routes.parameters import PolicyPath, ReplicaPath

router = APIRouter(prefix="/policies/{policy}/replicas", tags=["replicas"])


@router.put("/{replica}", summary="Report a replica")
def report_replica(
    policy: PolicyPath, replica: ReplicaPath, body: ReplicaReport, registry: RegistryDep
) -> ReplicaDocument:
    """After every change, and as a heartbeat. Answers with the head and how far it is ahead."""
    return registry.fleet.report(policy, replica, body)


@router.get("", summary="The fleet")
def list_replicas(policy: PolicyPath, registry: RegistryDep) -> FleetDocument:
    """Every replica that ever reported: what it serves, its lag, and whether it is lost."""
    return registry.fleet.replicas(policy)
