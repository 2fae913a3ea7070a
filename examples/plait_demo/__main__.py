"""`python -m plait_demo`: the same as `plait demo`."""

import typer

from plait_demo.cli import demo_command

if __name__ == "__main__":
    typer.run(demo_command)
