"""The client's own subcommands, one file per noun."""

import typer

from plait_client.commands import (
    channel,
    checkout,
    completion,
    diff,
    doctor,
    fleet,
    plan,
    publish,
    verify,
    versions,
)


def register(app: typer.Typer) -> None:
    """Hang the client's commands into the application."""
    for noun in (
        publish,
        checkout,
        versions,
        diff,
        plan,
        channel,
        verify,
        fleet,
        doctor,
        completion,
    ):
        noun.register(app)
