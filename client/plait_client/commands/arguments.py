"""Arguments that several commands share."""

from typing import Annotated

import typer

from plait_client.refs import usable_name

PolicyArgument = Annotated[
    str, typer.Argument(metavar="P", callback=lambda name: usable_name(name, "policy"))
]
