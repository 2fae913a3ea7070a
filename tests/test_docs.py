"""The documentation names what there is: settings, commands, errors; its links lead somewhere."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from plait import grain, limits
from plait.errors import type_registry
from plait_server.settings import Settings

# The rows of the format's limits, and the code that keeps them.
LIMITS = {
    "words of a layout": [limits.WORDS_MAX],
    "tensors": [limits.TENSORS_MAX],
    "rank of a tensor; bytes of its name": [limits.TENSOR_RANK_MAX, limits.TENSOR_NAME_BYTES_MAX],
    "product of a tensor's sides other than 0": [limits.TENSOR_ELEMENTS_MAX],
    "items of a frame": [limits.FRAME_ELEMENTS_MAX],
    "bytes of a `dense` or `wide` frame": [limits.DENSE_FRAME_BYTES_MAX],
    "items of a restart block": [limits.RESTART_ELEMENTS],
    "frames of a cut; segments of a frame": [limits.FRAMES_MAX, limits.SEGMENTS_PER_FRAME_MAX],
    "runs of a cut": [limits.RUNS_PER_CUT_MAX],
    "frames of all chunks of a manifest": [limits.FRAMES_MAX],
    "slot of a chunk; shares that plait cuts": [limits.FRAMES_MAX, grain.GRAIN_MAX],
    "a chunk; its header": [limits.CHUNK_BYTES_MAX, limits.CHUNK_HEADER_BYTES_MAX],
    "levels of lists and objects in a document": [limits.DOCUMENT_DEPTH_MAX],
    "values of a document: its commas and opening brackets outside strings": [
        limits.DOCUMENT_VALUES_MAX
    ],
    "a document": [limits.DOCUMENT_BYTES_MAX],
    "chunks of a manifest": [limits.CHUNKS_PER_MANIFEST_MAX],
    "side files; bytes of one; of its name": [
        limits.SIDE_FILES_MAX,
        limits.SIDE_FILE_BYTES_MAX,
        limits.SIDE_FILE_NAME_BYTES_MAX,
    ],
    "metadata of a version": [limits.METADATA_BYTES_MAX],
    "integers in documents": [limits.INTEGER_MAX],
}

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


def number_of(text: str) -> int:
    """What `2^53 − 1`, `8 MiB raw` or `255` says."""
    match text.split():
        case [power, "−", less]:
            return number_of(power) - int(less)
        case [count, "KiB" | "MiB" as unit, *_]:
            return int(count) << (10 if unit == "KiB" else 20)
        case [number]:
            base, _, power = number.partition("^")
            return math.prod([int(base)] * int(power or 1))
    raise AssertionError(f"no limit: {text!r}")


def test_the_limits_of_the_format_are_those_of_the_code() -> None:
    section = (ROOT / "docs/format.md").read_text().split("## 9. Limits")[1].split("## 10")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| ")][1:]
    found = {label.strip(): [number_of(part) for part in value.split(";")] for label, value in rows}
    assert found == LIMITS
