"""Versions: immutable committed states."""

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Query

from plait.errors import UnknownBase
from plait.limits import INTEGER_MAX, PAGE_SIZE_MAX
from plait.lineage import State, parse_ref
from plait.wire import VersionDocument, VersionPage
from plait_server.problems import StatusError
from plait_server.registry import RegistryDep
from plait_server.routes.parameters import DigestPath, FingerprintPath, PolicyPath, RefPath

router = APIRouter(prefix="/policies/{policy}", tags=["versions"])


@router.get("/versions", summary="Versions, newest first")
def list_versions(
    policy: PolicyPath,
    registry: RegistryDep,
    limit: Annotated[int, Query(ge=1, le=PAGE_SIZE_MAX)] = 100,
    before: Annotated[int | None, Query(ge=1, le=INTEGER_MAX)] = None,
) -> VersionPage:
    """A page of them; its `before` asks for the next one."""
    found = registry.catalog.versions(policy, limit, before)
    more = len(found) == limit and found[-1].seq > 1
    return VersionPage(versions=found, before=found[-1].seq if more else None)


@router.get("/versions/{ref}", summary="One version")
def get_version(policy: PolicyPath, ref: RefPath, registry: RegistryDep) -> VersionDocument:
    """By number, channel, step back along a channel's chain, or version digest."""
    return registry.catalog.resolve(policy, parse_ref(ref)).version


@router.get(
    "/states/{layout_digest}/{fingerprint}", summary="The versions that have exactly these weights"
)
def get_state(
    policy: PolicyPath,
    layout_digest: DigestPath,
    fingerprint: FingerprintPath,
    registry: RegistryDep,
) -> VersionPage:
    """Newest first. 404 `unknown_base` if there is none: these weights are nobody's version."""
    state = State(layout_digest, fingerprint)
    found = registry.catalog.versions_of_state(policy, state, PAGE_SIZE_MAX)
    if not found:
        unknown = UnknownBase(
            f"no version of policy {policy!r} has the weights {fingerprint}",
            remedy="publish them as a new anchor, or start from a version that is known",
        )
        raise StatusError(unknown, HTTPStatus.NOT_FOUND, {})
    return VersionPage(versions=found, before=None)
