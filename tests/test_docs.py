"""The documentation names what there is: settings, commands, errors; its links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from plait.errors import type_registry
from plait_server.settings import Settings

ROOT = Path(__file__).parents[1]
REFERENCE = (ROOT / "docs/reference.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("code", sorted(type_registry))
def test_every_error_code_is_documented_as_it_is(code: str) -> None:
    cls = type_registry[code]
    row = next((line for line in REFERENCE.splitlines() if line.startswith(f"| `{code}` |")), "")
    cells = [cell.strip() for cell in row.split("|")]
    assert cells[2:5] == [f"`{cls.__name__}`", str(cls.http_status), str(cls.exit_code)]


@pytest.mark.parametrize("field", sorted(Settings.model_fields))
def test_every_setting_is_documented(field: str) -> None:
    assert f"`PLAIT_{field.upper()}`" in REFERENCE


def test_every_command_is_documented() -> None:
    plait = Path(sys.executable).with_name("plait")
    text = subprocess.run([plait, "--help"], capture_output=True, text=True, check=True).stdout
    commands = re.findall(r"^  ([a-z]+)  ", text.split("Commands:")[1], flags=re.MULTILINE)
    assert len(commands) > 10
    assert [name for name in commands if f"`plait {name}" not in REFERENCE] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    rooms = "core client server trainer_agent rollout_agent tests examples scripts requirements"
    paths = re.findall(rf"`((?:{rooms.replace(' ', '|')})/[\w./-]+)`", page.read_text())
    assert [path for path in paths if not (ROOT / path).exists()] == []
