"""Commits: how versions come to be."""

from fastapi import APIRouter, Request, Response, status
from starlette.concurrency import run_in_threadpool

from plait.errors import NotFound
from plait.limits import DOCUMENT_BYTES_MAX
from plait.wire import CommitRequest, VersionDocument
from plait_server.bodies import json_body, lent_document, parse_json
from plait_server.registry import RegistryDep
from plait_server.routes.parameters import DigestPath, PolicyPath

router = APIRouter(prefix="/policies/{policy}/commits", tags=["commits"])


@router.post(
    "",
    status_code=status.HTTP_201_CREATED,
    summary="Commit a version and move a channel to it",
    responses={200: {"model": VersionDocument, "description": "It was committed before"}},
    openapi_extra=json_body(CommitRequest),
)
async def create_commit(
    policy: PolicyPath, request: Request, registry: RegistryDep, response: Response
) -> VersionDocument:
    """One transaction: all of it, or nothing.

    Refused with 409 `head_moved` or `generation_moved`, with head, generation and the channel's
    last event in `details`, where the channel isn't where the publisher believes. Safe to repeat:
    the version digest is the idempotency key, and a repeat gets the first answer with
    `Idempotency-Replayed: true`. After a broken connection or a 5xx, ask by version digest.
    """

    def commit(data: bytes) -> tuple[VersionDocument, bool]:
        return registry.commits.commit(policy, parse_json(request, data, CommitRequest))

    async with lent_document(request, registry.document_memory, DOCUMENT_BYTES_MAX) as body:
        version, again = await run_in_threadpool(commit, body)
    if again:
        response.status_code = status.HTTP_200_OK
        response.headers["idempotency-replayed"] = "true"
    else:
        registry.watch.poke()
    response.headers["location"] = f"/v1/policies/{policy}/versions/{version.seq}"
    return version


@router.get("/{version_digest}", summary="Was this version committed?")
def get_commit(
    policy: PolicyPath, version_digest: DigestPath, registry: RegistryDep
) -> VersionDocument:
    """404 `not_found`: no. What a publisher asks when the answer to its commit was lost."""
    found = registry.catalog.committed(policy, version_digest)
    if found is None:
        raise NotFound(f"no version {version_digest} was committed", digest=version_digest)
    return found
