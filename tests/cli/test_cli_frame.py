"""The frame of the command line: entry points, absent extras, help, completion, output."""

import importlib.metadata
import io
import json
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from plait.errors import LimitExceeded, NotInstalledError, PlaitError
from plait_client import cli, output
from plait_client.output import Output, counted, human_bytes, print_error
from tests.cli.conftest import Shell


def entry_point(name: str, value: str) -> importlib.metadata.EntryPoint:
    return importlib.metadata.EntryPoint(name=name, value=value, group=cli.GROUP)


def test_a_command_whose_extra_is_missing_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cli, "entry_points", lambda group: [entry_point("rollout", "no_such_package.cli:register")]
    )
    app = cli.build_app()
    result = CliRunner().invoke(app, ["follow", "p", "--engine", "http://x"])
    assert isinstance(result.exception, NotInstalledError)
    assert "plait[rollout]" in result.exception.remedy
    assert result.exception.exit_code == 2
    assert "plait[rollout]" in CliRunner().invoke(app, ["--help"]).stdout


def test_an_unhandled_exception_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "build_app", lambda: broken)
    with pytest.raises(ZeroDivisionError):
        cli.main()


@pytest.mark.parametrize("as_json", [False, True])
def test_main_leaves_with_the_exit_code_of_the_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    def refused(**_: object) -> None:
        raise LimitExceeded("too much", remedy="take less", limit=3)

    monkeypatch.setattr(cli, "build_app", lambda: refused)
    monkeypatch.setattr(sys, "argv", ["plait", "x", *(["--json"] if as_json else [])])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 1
    said = capsys.readouterr()
    assert said.out == ""
    if as_json:
        problem = json.loads(said.err)
        assert (problem["code"], problem["details"]) == ("limit_exceeded", {"limit": 3})
    else:
        assert said.err == "error: too much\n       take less\n"


def test_an_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "build_app", lambda: interrupted)
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 130


def test_every_command_has_help_and_json() -> None:
    command = get_command(cli.build_app())
    mine = {
        "publish", "checkout", "log", "show", "diff", "plan", "rollback", "verify", "fleet",
        "doctor", "completion",
    }  # fmt: skip
    commands = command.commands  # type: ignore[attr-defined]
    assert set(commands) >= mine | {"channel"}
    leaves = [commands[name] for name in mine] + list(commands["channel"].commands.values())
    for leaf in leaves:
        assert leaf.help
        assert any("--json" in parameter.opts for parameter in leaf.params), leaf.name


def test_progress_and_tables_are_for_people_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet = Output(as_json=True)
    quiet.line("words")
    quiet.table(("a",), [(1,)])
    with quiet.progress() as progress:
        progress.begin("task", 10)
        progress.advance(10)
    quiet.document({"a": "ü"})
    said = capsys.readouterr()
    assert json.loads(said.out) == {"a": "ü"}
    assert said.err == ""
    Output(as_json=False).table(("n", "what"), [(1234567, "[bold]x")])
    assert capsys.readouterr().out.split() == ["n", "what", "1,234,567", "[bold]x"]


def test_bars_are_drawn_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with Output(as_json=True).progress() as progress:
        progress.begin("fetching", 2_000_000)
        progress.advance(1_000_000)
        progress.begin("writing", 10)
        progress.advance(10)
    assert "writing" in terminal.getvalue()


def test_errors_without_a_remedy_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(PlaitError("it failed"), as_json=False)
    assert capsys.readouterr().err == "error: it failed\n"
    assert output.human_bytes(0) == "0 B"
    assert [human_bytes(n) for n in (999, 1000, 1_234_567, 5 * 10**12)] == [
        "999 B", "1 kB", "1.23 MB", "5 TB",
    ]  # fmt: skip


def test_completion_completes(installed: Shell, tmp_path: Path) -> None:
    script = installed.run("completion", "bash").stdout
    assert "complete" in script
    assert "_PLAIT_COMPLETE" in script
    words = {"_PLAIT_COMPLETE": "complete_bash", "COMP_WORDS": "plait ch", "COMP_CWORD": "1"}
    assert set(installed.run(**words).stdout.split()) == {"checkout", "channel"}
    assert installed.json("completion", "zsh")["shell"] == "zsh"
    assert installed.run("--version").stdout.startswith("0.")


def test_one_is_not_many() -> None:
    assert [counted(n, "step") for n in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
