"""`plait diff`."""

from dataclasses import asdict
from typing import Annotated

import typer

from plait.errors import UsageError
from plait_client.compare import compare_versions
from plait_client.connection import connected, fetcher_of
from plait_client.output import JsonOption, Output
from plait_client.refs import split_ref


def register(app: typer.Typer) -> None:
    app.command("diff")(diff_command)


def diff_command(
    first: Annotated[str, typer.Argument(metavar="P@A")],
    second: Annotated[str, typer.Argument(metavar="P@B")],
    json: JsonOption = False,
) -> None:
    """Count what differs between two versions, tensor by tensor."""
    output = Output(as_json=json)
    (policy, a), (other, b) = split_ref(first), split_ref(second)
    if policy != other:
        raise UsageError(f"{policy!r} and {other!r} are two policies; versions of one compare")
    with connected() as client, output.progress() as progress:
        old, new = client.version(policy, a), client.version(policy, b)
        changes = compare_versions(fetcher_of(client), old, new, progress)
    changed = sum(change.changed for change in changes)
    output.document(
        {
            "policy": policy,
            "from": old.seq,
            "to": new.seq,
            "changed_elements": changed,
            "total_elements": new.total_elements,
            "tensors": [asdict(change) for change in changes],
        }
    )
    output.table(
        ("tensor", "dtype", "shape", "changed", "of", "share"),
        [
            (c.name, c.dtype, list(c.shape), c.changed, c.total, f"{c.changed / c.total:.3%}")
            for c in changes
        ],
    )
    output.line(f"{changed:,} of {new.total_elements:,} elements differ")
