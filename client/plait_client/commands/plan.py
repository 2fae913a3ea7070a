"""`plait plan`."""

from typing import Annotated

import typer

from plait.wire import HeldState
from plait_client.commands.arguments import PolicyArgument
from plait_client.connection import connected
from plait_client.output import JsonOption, Output, counted, human_bytes


def register(app: typer.Typer) -> None:
    app.command("plan")(plan_command)


def plan_command(
    policy: PolicyArgument,
    to: Annotated[str, typer.Option("--to", help="REF to arrive at.")] = "main",
    held: Annotated[
        str | None, typer.Option("--from", help="REF whose weights are held; else nothing is.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show the cheapest way from one version to another."""
    output = Output(as_json=json)
    with connected() as client:
        state = None
        if held is not None:
            version = client.version(policy, held)
            state = HeldState(layout_digest=version.layout_digest, fingerprint=version.fingerprint)
        plan = client.plan(policy, state, to)
    output.document(plan)
    output.table(
        ("step", "to", "chunks", "bytes", "manifest"),
        [
            (s.kind, s.to_seq, len(s.chunks), human_bytes(s.bytes), s.manifest_digest[:19])
            for s in plan.steps
        ],
    )
    steps = counted(len(plan.steps), "step")
    output.line(f"{steps} to {policy}@{plan.seq}, {human_bytes(plan.total_bytes)}")
