"""The house rules that a linter can hold: who may import what, and how large a room may grow."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("core", "client", "server", "trainer_agent", "rollout_agent", "examples", "migrations")
FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70

# What may be imported only in some places: library → path prefixes.
ONLY_IN = {
    "sglang": ("rollout_agent/plait_rollout/sglang/",),
    "sqlalchemy": ("server/plait_server/catalog/", "migrations/"),
    "alembic": ("server/plait_server/catalog/", "migrations/"),
    "fsspec": ("core/plait/store/fsspec.py",),
    "torch": ("core/plait/tensors/", "trainer_agent/", "rollout_agent/", "examples/"),
    "fastapi": ("server/",),
    "transformers": ("examples/", "trainer_agent/plait_trainer/callback.py"),
}


def sources(*rooms: str) -> Iterator[Path]:
    for room in rooms:
        yield from sorted((ROOT / room).rglob("*.py"))


def imported_packages(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]


def test_imports_point_one_way() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("library", sorted(ONLY_IN))
def test_a_heavy_library_is_imported_only_in_its_room(library: str) -> None:
    offenders = [
        str(path.relative_to(ROOT))
        for path in sources(*ROOMS)
        if library in imported_packages(ast.parse(path.read_text()))
        and not str(path.relative_to(ROOT)).startswith(ONLY_IN[library])
    ]
    assert offenders == []


def test_no_module_is_named_after_nothing() -> None:
    nameless = {"utils", "util", "common", "helpers", "helper", "misc"}
    assert [p.name for p in sources(*ROOMS, "tests") if p.stem in nameless] == []


def test_every_module_opens_with_a_docstring() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in sources(*ROOMS)
        if path.read_text().strip() and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []


def test_files_stay_small() -> None:
    sizes = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in sources(*ROOMS)}
    assert {path: lines for path, lines in sizes.items() if lines > FILE_LINES_MAX} == {}


def test_functions_fit_a_screen() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in sources(*ROOMS)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno + 1 > FUNCTION_LINES_MAX
    ]
    assert long == []


def test_the_error_tree_is_drawn_as_it_is() -> None:
    from plait import errors

    drawn: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        body = line.replace("│", " ").replace("├──", "   ").replace("└──", "   ")
        name = body.strip().split(" ")[0]
        if name in vars(errors) and isinstance(vars(errors)[name], type):
            drawn.append(((len(body) - len(body.lstrip()) - 4) // 4, name))
    actual: list[tuple[int, str]] = []

    def walk(cls: type, depth: int) -> None:
        actual.append((depth, cls.__name__))
        for child in cls.__subclasses__():
            if child.__module__ == errors.__name__:
                walk(child, depth + 1)

    walk(errors.PlaitError, 0)
    assert drawn == actual


def test_error_codes_are_unique() -> None:
    from plait.errors import PlaitError, type_registry

    def classes(cls: type[PlaitError]) -> Iterator[type[PlaitError]]:
        for child in cls.__subclasses__():
            yield child
            yield from classes(child)

    codes = [cls.code for cls in set(classes(PlaitError))]
    assert len(codes) == len(set(codes)) == len(type_registry)
