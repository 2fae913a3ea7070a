"""Policies: named lines of weights."""

from fastapi import APIRouter, status

from plait.names import check_name
from plait.wire import CreatePolicy, PolicyDocument, PolicyList
from plait_server.registry import RegistryDep
from plait_server.routes.parameters import PolicyPath

router = APIRouter(prefix="/policies", tags=["policies"])


@router.post("", status_code=status.HTTP_201_CREATED, summary="Create a policy")
def create_policy(body: CreatePolicy, registry: RegistryDep) -> PolicyDocument:
    """409 `exists` if there is one of that name."""
    created = registry.catalog.create_policy(check_name(body.name, "policy"))
    registry.watch.poke()
    return created


@router.get("", summary="All policies, by name")
def list_policies(registry: RegistryDep) -> PolicyList:
    """With their channels and how many versions each has."""
    return PolicyList(policies=registry.catalog.policies())


@router.get("/{policy}", summary="One policy")
def get_policy(policy: PolicyPath, registry: RegistryDep) -> PolicyDocument:
    """404 `not_found` if there is none."""
    return registry.catalog.policy(policy)
