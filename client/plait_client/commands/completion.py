"""`plait completion`."""

from enum import StrEnum
from typing import Annotated

import typer
from typer._completion_shared import get_completion_script

from plait_client.output import JsonOption, Output


class Shell(StrEnum):
    """Shells that complete."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def register(app: typer.Typer) -> None:
    app.command("completion")(completion_command)


def completion_command(shell: Annotated[Shell, typer.Argument()], json: JsonOption = False) -> None:
    """Print a shell's completion script: `eval "$(plait completion bash)"`."""
    output = Output(as_json=json)
    script = get_completion_script(
        prog_name="plait", complete_var="_PLAIT_COMPLETE", shell=shell.value
    )
    output.document({"shell": shell.value, "script": script})
    output.line(script)
