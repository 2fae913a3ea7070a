"""The HTTP documents of `/v1`, one file per noun. The server sends what the client reads."""

from plait.wire.channels import (
    ChannelDocument,
    ChannelEvent,
    ChannelHistory,
    ChannelList,
    CreateChannel,
    MoveKind,
    MoveRequest,
)
from plait.wire.chunks import AdoptRequest, ChunkDocument, MissingRequest, MissingResponse
from plait.wire.commits import CommitRequest
from plait.wire.config import ConfigDocument
from plait.wire.events import EventDocument, EventPage
from plait.wire.plans import HeldState, PlanChunk, PlanDocument, PlanRequest, PlanStep
from plait.wire.policies import CreatePolicy, PolicyDocument, PolicyList
from plait.wire.problem import Problem, error_of, problem_of
from plait.wire.replicas import FleetDocument, Phase, ReplicaDocument, ReplicaReport
from plait.wire.versions import VersionDocument, VersionPage

__all__ = [
    "AdoptRequest",
    "ChannelDocument",
    "ChannelEvent",
    "ChannelHistory",
    "ChannelList",
    "ChunkDocument",
    "CommitRequest",
    "ConfigDocument",
    "CreateChannel",
    "CreatePolicy",
    "EventDocument",
    "EventPage",
    "FleetDocument",
    "HeldState",
    "MissingRequest",
    "MissingResponse",
    "MoveKind",
    "MoveRequest",
    "Phase",
    "PlanChunk",
    "PlanDocument",
    "PlanRequest",
    "PlanStep",
    "PolicyDocument",
    "PolicyList",
    "Problem",
    "ReplicaDocument",
    "ReplicaReport",
    "VersionDocument",
    "VersionPage",
    "error_of",
    "problem_of",
]
