"""`plait serve`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from plait.errors import NotInstalledError, UsageError


def register(app: typer.Typer) -> None:
    """Adds the registry's commands to the `plait` command."""
    app.command(name="serve", help="Run a registry.")(serve)


def serve(
    data: Annotated[
        Path | None, typer.Option(help="Folder for database and objects. [.plait-data]")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. [127.0.0.1]")] = None,
    port: Annotated[
        int | None, typer.Option(help="Port to listen on; 0 takes a free one. [8400]")
    ] = None,
    database: Annotated[
        str | None, typer.Option(help="sqlite:///… or postgresql://…; default: in the folder.")
    ] = None,
    store: Annotated[
        str | None, typer.Option(help="Folder, file://, s3://, gs:// or az://; default: as above.")
    ] = None,
) -> None:
    """Run a registry. Prints its address once it serves; ends on SIGTERM or Ctrl-C."""
    try:
        import pydantic
        import uvicorn.logging  # noqa: F401

        from plait_server.serving import serve as run
        from plait_server.settings import Settings
    except ModuleNotFoundError as error:
        raise NotInstalledError(
            f"`plait serve` needs {error.name}", remedy="pip install 'plait[server]'"
        ) from error
    options: dict[str, Any] = {
        "data": data,
        "host": host,
        "port": port,
        "database_url": database,
        "store": store,
    }
    given = {name: value for name, value in options.items() if value is not None}
    try:
        settings = Settings(**given)
    except pydantic.ValidationError as error:
        rows = [f"{'.'.join(map(str, row['loc']))}: {row['msg']}" for row in error.errors()]
        raise UsageError(f"settings: {'; '.join(rows)}") from error
    run(settings)
