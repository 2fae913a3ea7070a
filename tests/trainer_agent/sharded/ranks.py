"""Several processes of one training job, over gloo on this host: started, watched, killed.

Each runs `python -m tests.trainer_agent.sharded.job RANK SIZE FOLDER SCENARIO ARGUMENTS`, and
leaves what it has to tell in the folder.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]

# Far more than a job takes: only a hang gets here.
_ENDS_WITHIN_SECONDS = 240.0


@dataclass(frozen=True)
class Ended:
    """One process of a job that has ended.

    Attributes:
        code: that it exited with; negative: the signal that killed it.
        said: what it reported, by name.
        log: stdout and stderr.
    """

    code: int
    said: Mapping[str, Any]
    log: str


def run_job(
    scenario: str, size: int, folder: Path, *arguments: str,
    failpoints: Mapping[int, str] | None = None,
) -> list[Ended]:  # fmt: skip
    """Runs a job of `size` processes to its end; in order of their ranks.

    Args:
        folder: of the job, made if need be: what is in it, the job finds.
        failpoints: where a rank kills itself.
    """
    folder.mkdir(parents=True, exist_ok=True)
    store = folder / f"store-{len(list(folder.glob('store-*')))}"
    processes = []
    for rank in range(size):
        environment = {**os.environ, "PLAIT_FAILPOINT": (failpoints or {}).get(rank, "")}
        environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PLAIT_WORKERS": "1"}
        command = [sys.executable, "-m", "tests.trainer_agent.sharded.job", str(rank), str(size),
                   str(store), str(folder), scenario, *arguments]  # fmt: skip
        log = (folder / f"log-{rank}").open("wb")
        processes.append(
            subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        )
        log.close()
    try:
        codes = [process.wait(_ENDS_WITHIN_SECONDS) for process in processes]
    except subprocess.TimeoutExpired as error:
        logs = "\n".join((folder / f"log-{rank}").read_text() for rank in range(size))
        raise AssertionError(f"the job hangs:\n{logs}") from error
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [_ended(code, folder, rank) for rank, code in enumerate(codes)]


def succeeded(ranks: list[Ended]) -> list[Ended]:
    for rank in ranks:
        assert rank.code == 0, rank.log
    return ranks


def _ended(code: int, folder: Path, rank: int) -> Ended:
    said = folder / f"said-{rank}.json"
    found = json.loads(said.read_text()) if said.exists() else {}
    said.unlink(missing_ok=True)
    return Ended(code, found, (folder / f"log-{rank}").read_text())
