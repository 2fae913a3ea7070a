"""A long run of every fuzz target, steered by coverage: `make fuzz SECONDS=3600`.

    python -m tests.fuzz --seconds 3600     all targets in turn
    python -m tests.fuzz run TARGET …       one of them; libFuzzer's options follow
    python -m tests.fuzz replay TARGET FILE  one finding, with its traceback

The corpus grows in .cache/fuzz/TARGET, findings lie in .cache/fuzz/findings. The kernels are
compiled with bounds checks, so that a write beyond an array is a finding rather than luck.
"""

import argparse
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

_FOLDER: Final = Path(".cache/fuzz")
_FINDINGS: Final = _FOLDER / "findings"
_MEMORY_MIB: Final = 1024
_PART_SECONDS: Final = 120
_SECONDS_PER_INPUT: Final = 30
_INPUT_BYTES: Final = 2048


def main() -> int:
    if sys.argv[1:2] == ["run"]:
        return _run(sys.argv[2], sys.argv[3:])
    if sys.argv[1:2] == ["replay"]:
        return _replay(sys.argv[2], Path(sys.argv[3]))
    options = argparse.ArgumentParser(description="Fuzzes every target in turn.")
    options.add_argument("--seconds", type=int, default=3600, help="for all targets together")
    options.add_argument("targets", nargs="*", help="all of them by default")
    arguments = options.parse_args()
    return _run_all(arguments.targets, arguments.seconds)


def _run_all(names: list[str], seconds: int) -> int:
    from tests.fuzz.targets import TARGETS

    names = names or list(TARGETS)
    if unknown := sorted(set(names) - set(TARGETS)):
        sys.exit(f"no fuzz target {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    _FINDINGS.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in names:
        (_FOLDER / name).mkdir(exist_ok=True)
        (_FOLDER / f"{name}.log").write_text("")
        before = set(_FINDINGS.iterdir())
        executions, code = _run_parts(name, max(seconds // len(names), 1))
        found = sorted(set(_FINDINGS.iterdir()) - before)
        failed += bool(found) or code != 0
        print(
            f"{name:16} {executions:>10,} executions, "
            f"{len(list((_FOLDER / name).iterdir())):>5} inputs kept, {len(found)} findings"
            + "".join(f"\n  {path}" for path in found)
            + (f"\n  ended with {code}, see {_FOLDER / name}.log" if code else ""),
            flush=True,
        )
    return min(failed, 1)


def _run_parts(name: str, seconds: int) -> tuple[int, int]:
    """Runs a target in processes that follow each other: executions, and how the last one ended.

    A process that lasted would reach the limit on memory by itself: atheris keeps 160 bytes of
    every comparison of arrays.
    """
    executions = 0
    for done in range(0, seconds, _PART_SECONDS):
        command = [
            sys.executable, "-m", "tests.fuzz", "run", name, str(_FOLDER / name),
            f"-max_total_time={min(_PART_SECONDS, seconds - done)}", f"-max_len={_INPUT_BYTES}",
            f"-rss_limit_mb={_MEMORY_MIB}", f"-timeout={_SECONDS_PER_INPUT}",
            f"-artifact_prefix={_FINDINGS}/{name}-", "-print_final_stats=1", "-verbosity=0",
            # On a busy machine any input may take long: only one that never ends is a finding.
            f"-report_slow_units={_SECONDS_PER_INPUT}",
        ]  # fmt: skip
        environment = os.environ | {
            "NUMBA_BOUNDSCHECK": "1",
            "NUMBA_CACHE_DIR": str((_FOLDER / "compiled").resolve()),
        }
        part = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        log = part.stdout + part.stderr
        with (_FOLDER / f"{name}.log").open("a") as file:
            file.write(log)
        counted = re.search(r"number_of_executed_units: (\d+)", log)
        executions += int(counted[1]) if counted else 0
        if part.returncode:
            return executions, part.returncode
    return executions, 0


def _compiled() -> list[str]:
    """Modules that hold or make kernels: numba can't read what atheris makes of functions."""
    spec = importlib.util.find_spec("plait")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    return [
        ".".join(["plait", *path.relative_to(root).with_suffix("").parts])
        for path in sorted(root.rglob("*.py"))
        if re.search("^(from|import) numba", path.read_text(), flags=re.MULTILINE)
    ]


def _run(name: str, options: list[str]) -> int:
    import atheris

    with atheris.instrument_imports(["plait", "plait_client"], _compiled()):
        from tests.fuzz.targets import TARGETS
    atheris.Setup([sys.argv[0], *options], TARGETS[name])
    atheris.Fuzz()
    return 0


def _replay(name: str, path: Path) -> int:
    from tests.fuzz.targets import TARGETS

    TARGETS[name](path.read_bytes())
    print(f"{path}: refused or read right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
