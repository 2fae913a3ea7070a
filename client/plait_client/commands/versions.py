"""`plait log` and `plait show`."""

from typing import Annotated

import typer

from plait.limits import PAGE_SIZE_MAX
from plait_client.commands.arguments import PolicyArgument
from plait_client.connection import connected
from plait_client.output import JsonOption, Output, human_bytes
from plait_client.refs import split_ref


def register(app: typer.Typer) -> None:
    app.command("log")(log_command)
    app.command("show")(show_command)


def log_command(
    policy: PolicyArgument,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=PAGE_SIZE_MAX)] = 50,
    before: Annotated[
        int | None, typer.Option(min=1, help="Only versions older than this.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """List a policy's versions, newest first."""
    output = Output(as_json=json)
    with connected() as client:
        page = client.versions(policy, limit=limit, before=before)
        channels = client.channels(policy)
    names: dict[int, list[str]] = {}
    for channel in channels:
        names.setdefault(channel.seq, []).append(channel.channel)
    output.document({"policy": policy, **page.model_dump(mode="json")})
    output.table(
        ("version", "parent", "kind", "changed", "payload", "committed", "heads", "message"),
        [
            (
                v.seq,
                v.parent,
                "external" if v.external else v.kind,
                f"{v.changed_elements / max(v.total_elements, 1):.3%}",
                human_bytes(v.payload_bytes),
                v.committed_at[:19],
                " ".join(names.get(v.seq, ())),
                str(v.metadata.get("message", ""))[:60],
            )
            for v in page.versions
        ],
    )


def show_command(
    ref: Annotated[str, typer.Argument(metavar="P@REF")],
    json: JsonOption = False,
) -> None:
    """Show one version."""
    output = Output(as_json=json)
    policy, to = split_ref(ref)
    with connected() as client:
        version = client.version(policy, to)
    output.document(version)
    fields = version.model_dump(mode="json")
    output.table(("field", "value"), [(name, _text(value)) for name, value in fields.items()])


def _text(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if type(value) is int else str(value)
