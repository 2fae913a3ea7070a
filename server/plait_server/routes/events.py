"""Events: hints to look again, as pages or as a stream."""

import re
from collections.abc import AsyncIterator
from typing import Annotated, Final

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from starlette.concurrency import run_in_threadpool

from plait.errors import ConflictError, RequestRejected
from plait.limits import INTEGER_MAX, NAME_BYTES_MAX, PAGE_SIZE_MAX
from plait.wire import EventPage
from plait_server.registry import Registry, RegistryDep

router = APIRouter(tags=["events"])

_LAST_ID: Final = re.compile(r"(?P<epoch>[0-9a-f]{1,32})-(?P<revision>\d{1,16})")
_IDLE_SECONDS: Final = 15.0
_RETRY_MILLISECONDS: Final = 1000


@router.get(
    "/events",
    summary="What happened after a revision",
    response_model=EventPage,
    responses={
        200: {
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
            "description": "A page; a stream without end for `Accept: text/event-stream`",
        }
    },
)
async def get_events(
    registry: RegistryDep,
    request: Request,
    after: Annotated[int | None, Query(ge=0, le=INTEGER_MAX)] = None,
    policy: Annotated[str | None, Query(max_length=NAME_BYTES_MAX, pattern=r"^[^\x00]*$")] = None,
    limit: Annotated[int, Query(ge=1, le=PAGE_SIZE_MAX)] = PAGE_SIZE_MAX,
    last_event_id: Annotated[str | None, Header()] = None,
) -> EventPage | Response:
    """In commit order, oldest first; nothing is left out.

    As a stream (server-sent events) each `id` is `EPOCH-REVISION`; a client that reconnects with
    `Last-Event-ID` misses nothing. Without `after`, a stream begins now, a page at the beginning.
    """
    if "text/event-stream" not in request.headers.get("accept", ""):
        return await run_in_threadpool(registry.catalog.events, after or 0, policy, limit)
    if last_event_id is not None:
        after = _revision_of(last_event_id, registry.catalog.epoch)
    if after is None:
        after = await run_in_threadpool(registry.catalog.revision)
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return EventSourceResponse(_stream(registry, after, policy), headers=headers)


async def _stream(registry: Registry, after: int, policy: str | None) -> AsyncIterator[bytes]:
    yield format_sse_event(comment="events", retry=_RETRY_MILLISECONDS)
    epoch = registry.catalog.epoch
    async for event in registry.watch.stream(after, policy, idle_seconds=_IDLE_SECONDS):
        if event is None:
            yield KEEPALIVE_COMMENT
        else:
            yield format_sse_event(
                event=event.type,
                data_str=event.model_dump_json(),
                id=f"{epoch}-{event.revision}",
            )


def _revision_of(last_event_id: str, epoch: str) -> int:
    match = _LAST_ID.fullmatch(last_event_id)
    if match is None:
        raise RequestRejected(f"Last-Event-ID {last_event_id[:80]!r}; expected EPOCH-REVISION")
    if match["epoch"] != epoch:
        raise ConflictError(
            f"event {last_event_id!r} is of another epoch; this one is {epoch}",
            remedy="read the channels again, then follow the events from now on",
        )
    return int(match["revision"])
