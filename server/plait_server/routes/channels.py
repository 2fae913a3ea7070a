"""Channels: where they point, how they move, and waiting for it."""

import re
from typing import Annotated, Final

from fastapi import APIRouter, Header, Query, Response, status
from starlette.concurrency import run_in_threadpool

from plait.errors import UsageError
from plait.limits import INTEGER_MAX, PAGE_SIZE_MAX, WAIT_SECONDS_MAX
from plait.lineage import parse_ref
from plait.names import check_name
from plait.wire import ChannelDocument, ChannelHistory, ChannelList, CreateChannel, MoveRequest
from plait_server import failpoints
from plait_server.registry import RegistryDep
from plait_server.routes.parameters import ChannelPath, PolicyPath

router = APIRouter(prefix="/policies/{policy}/channels", tags=["channels"])

_WAIT: Final = re.compile(r"(?:^|[,;])\s*wait\s*=\s*\"?(\d{1,6})\"?\s*(?:$|[,;])")


@router.get("", summary="All channels, by name")
def list_channels(policy: PolicyPath, registry: RegistryDep) -> ChannelList:
    """Where each of them points now."""
    return ChannelList(channels=registry.catalog.channels(policy))


@router.post("", status_code=status.HTTP_201_CREATED, summary="Create a channel")
def create_channel(
    policy: PolicyPath, body: CreateChannel, registry: RegistryDep
) -> ChannelDocument:
    """At any version; its generation is 1."""
    name = check_name(body.name, "channel")
    created = registry.catalog.create_channel(policy, name, parse_ref(body.to), body.actor)
    registry.watch.poke()
    return created


@router.get(
    "/{channel}",
    summary="Where a channel points, or its next movement",
    response_model=ChannelDocument,
    responses={304: {"description": "Still there, also after the wait"}},
)
async def get_channel(
    policy: PolicyPath,
    channel: ChannelPath,
    registry: RegistryDep,
    response: Response,
    if_none_match: Annotated[str | None, Header(examples=['"3f2a9c0d11e84b7a.41"'])] = None,
    prefer: Annotated[str | None, Header(examples=["wait=30"])] = None,
) -> ChannelDocument | Response:
    """The ETag is `"EPOCH.GENERATION"`.

    With `If-None-Match` the answer is 304 while the channel hasn't moved; with `Prefer: wait=N` as
    well, the registry waits up to N seconds (60 at most) for a movement before it answers so.
    """
    seconds = _wait_seconds(prefer) if if_none_match else 0.0
    if seconds:
        response.headers["preference-applied"] = f"wait={seconds:.0f}"
    with registry.watch.waiting_for(policy, channel) as wait:
        found = await run_in_threadpool(registry.catalog.channel, policy, channel)
        if seconds and _etag(found) in (if_none_match or ""):
            found = await wait.moved(found.generation, seconds) or found
    response.headers["etag"] = _etag(found)
    response.headers["cache-control"] = "no-cache"
    if if_none_match and _etag(found) in if_none_match:
        return Response(status_code=status.HTTP_304_NOT_MODIFIED, headers=response.headers)
    return found


@router.post("/{channel}/moves", summary="Promote or roll back a channel")
def move_channel(
    policy: PolicyPath,
    channel: ChannelPath,
    body: MoveRequest,
    registry: RegistryDep,
    response: Response,
) -> ChannelDocument:
    """Compare-and-set on the generation. Safe to repeat under one `move_id`.

    A rollback to an older version makes a larger generation, so followers take it as news.
    """
    if body.kind == "rollback" and not body.reason.strip():
        raise UsageError("a rollback needs a reason", remedy="say why: it stays in the history")
    moved, again = registry.catalog.move_channel(policy, channel, parse_ref(body.to), body)
    failpoints.reach("move.committed")
    if again:
        response.headers["idempotency-replayed"] = "true"
    else:
        registry.watch.poke()
    return moved


@router.get("/{channel}/history", summary="Movements of a channel, newest first")
def get_history(
    policy: PolicyPath,
    channel: ChannelPath,
    registry: RegistryDep,
    limit: Annotated[int, Query(ge=1, le=PAGE_SIZE_MAX)] = PAGE_SIZE_MAX,
    before: Annotated[int | None, Query(ge=1, le=INTEGER_MAX)] = None,
) -> ChannelHistory:
    """Who moved it, from where to where, when and why. Nothing is ever removed: `before` a
    generation asks for older ones, down to generation 1."""
    return ChannelHistory(events=registry.catalog.history(policy, channel, limit, before))


def _etag(channel: ChannelDocument) -> str:
    return f'"{channel.epoch}.{channel.generation}"'


def _wait_seconds(prefer: str | None) -> float:
    match = _WAIT.search(prefer or "")
    return min(float(match[1]), WAIT_SECONDS_MAX) if match else 0.0
