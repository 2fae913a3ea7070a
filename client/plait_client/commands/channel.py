"""`plait channel list|create|move` and `plait rollback`."""

import secrets
from typing import Annotated, Literal

import typer

from plait.wire import ChannelDocument, MoveRequest
from plait_client.commands.arguments import PolicyArgument
from plait_client.connection import actor, connected
from plait_client.output import JsonOption, Output
from plait_client.registry import RegistryClient

NameArgument = Annotated[str, typer.Argument(metavar="NAME")]
ToOption = Annotated[str, typer.Option("--to", metavar="REF")]
GenerationOption = Annotated[
    int | None,
    typer.Option("--generation", help="Move only if the channel still has this generation."),
]


def register(app: typer.Typer) -> None:
    noun = typer.Typer(help="Movable names for versions.", no_args_is_help=True)
    noun.command("list")(list_command)
    noun.command("create")(create_command)
    noun.command("move")(move_command)
    app.add_typer(noun, name="channel")
    app.command("rollback")(rollback_command)


def list_command(policy: PolicyArgument, json: JsonOption = False) -> None:
    """List a policy's channels."""
    output = Output(as_json=json)
    with connected() as client:
        channels = client.channels(policy)
    output.document({"channels": [c.model_dump(mode="json") for c in channels]})
    output.table(
        ("channel", "version", "generation", "moved by", "at", "reason"),
        [(c.channel, c.seq, c.generation, c.kind, c.moved_at[:19], c.reason) for c in channels],
    )


def create_command(
    policy: PolicyArgument, name: NameArgument, to: ToOption, json: JsonOption = False
) -> None:
    """Create a channel that names a version."""
    with connected() as client:
        _print(client.create_channel(policy, name, to=to, actor=actor()), json)


def move_command(
    policy: PolicyArgument,
    name: NameArgument,
    to: ToOption,
    reason: Annotated[str, typer.Option(help="Kept in the channel's history.")] = "",
    generation: GenerationOption = None,
    json: JsonOption = False,
) -> None:
    """Let a channel name another version."""
    with connected() as client:
        _print(_move(client, policy, name, to, "promote", reason, generation), json)


def rollback_command(
    policy: PolicyArgument,
    to: ToOption,
    reason: Annotated[str, typer.Option(help="Kept in the channel's history for ever.")],
    channel: Annotated[str, typer.Option()] = "main",
    generation: GenerationOption = None,
    json: JsonOption = False,
) -> None:
    """Let a channel name an earlier version; followers subtract the deltas in between."""
    with connected() as client:
        _print(_move(client, policy, channel, to, "rollback", reason, generation), json)


def _move(
    client: RegistryClient,
    policy: str,
    channel: str,
    to: str,
    kind: Literal["promote", "rollback"],
    reason: str,
    generation: int | None,
) -> ChannelDocument:
    if generation is None:
        generation = client.channel(policy, channel).generation
    request = MoveRequest.of(
        to=to,
        expected_generation=generation,
        kind=kind,
        move_id=secrets.token_hex(16),
        reason=reason,
        actor=actor(),
    )
    return client.move_channel(policy, channel, request)


def _print(channel: ChannelDocument, as_json: bool) -> None:
    output = Output(as_json=as_json)
    output.document(channel)
    output.line(
        f"{channel.policy}: {channel.channel} names version {channel.seq} "
        f"(generation {channel.generation})"
    )
