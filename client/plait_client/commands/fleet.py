"""`plait fleet`."""

import typer

from plait.wire import ReplicaDocument
from plait_client.commands.arguments import PolicyArgument
from plait_client.connection import connected
from plait_client.output import JsonOption, Output


def register(app: typer.Typer) -> None:
    app.command("fleet")(fleet_command)


def fleet_command(policy: PolicyArgument, json: JsonOption = False) -> None:
    """List the replicas of a policy and how far each is behind."""
    output = Output(as_json=json)
    with connected() as client:
        replicas = client.replicas(policy)
    output.document({"replicas": [r.model_dump(mode="json") for r in replicas]})
    output.table(
        ("replica", "channel", "phase", "version", "head", "lag", "seconds", "seen", "note"),
        [
            (
                r.replica,
                r.report.channel,
                r.report.phase,
                r.report.seq,
                r.head_seq,
                r.lag_versions,
                round(r.lag_seconds, 1),
                r.last_seen_at[:19],
                _note(r),
            )
            for r in replicas
        ],
    )


def _note(replica: ReplicaDocument) -> str:
    notes = ["lost"] if replica.lost else []
    notes += ["drifted"] if replica.drifted else []
    return ", ".join([*notes, replica.report.error][: 1 + len(notes)]).strip(", ")
