"""Training jobs of several processes, over gloo on this host: started, killed, and listened to.

A launcher imports what they need once and forks a process for each rank, one job after the other.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]

# Far more than a job takes: only a hang gets here.
_ENDS_WITHIN_SECONDS = 180.0


@dataclass(frozen=True)
class Job:
    """What the processes of a job do.

    Attributes:
        scenario: of scenarios.py.
        size: number of processes; 1 is an ordinary program without torch.distributed.
        arguments: of the scenario, by name.
        failpoints: rank → where it kills itself.
        folder: that it finds and leaves files in; None: a new one.
    """

    scenario: str
    size: int
    arguments: Mapping[str, object]
    failpoints: Mapping[int, str] = field(default_factory=dict)
    folder: Path | None = None


@dataclass(frozen=True)
class Ended:
    """One process of a job that has ended.

    Attributes:
        code: that it exited with: 0; negative: the signal that killed it.
        said: what it reported, by name; `error` is the code of a typed error that it ended with.
        log: stdout and stderr.
    """

    code: int
    said: Mapping[str, Any]
    log: str


def run_jobs(folder: Path, jobs: Sequence[Job]) -> list[list[Ended]]:
    """Runs jobs one after the other; each as its processes, in order of their ranks."""
    rows = []
    for number, job in enumerate(jobs):
        own = folder / f"job-{number}"
        own.mkdir(parents=True)
        rows.append(
            {
                "scenario": job.scenario, "size": job.size, "arguments": job.arguments,
                "failpoints": {str(rank): name for rank, name in job.failpoints.items()},
                "logs": str(own), "folder": str(job.folder or own),
            }
        )  # fmt: skip
    (folder / "jobs.json").write_text(json.dumps(rows, default=str))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PLAIT_WORKERS": "1"}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "PLAIT_FAILPOINT": ""}
    with (folder / "launcher.log").open("wb") as log:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "tests.trainer_agent.sharded.launcher", str(folder)],
            cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        code = launcher.wait(_ENDS_WITHIN_SECONDS)
    except subprocess.TimeoutExpired as error:
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()
        logs = "\n".join(f"{p}:\n{p.read_text()}" for p in sorted(folder.glob("job-*/log-*")))
        raise AssertionError(f"a job hangs:\n{logs}") from error
    assert code == 0, (folder / "launcher.log").read_text()
    codes = json.loads((folder / "codes.json").read_text())
    return [
        [_ended(folder / f"job-{number}", rank, code) for rank, code in enumerate(row)]
        for number, row in enumerate(codes)
    ]


def run_job(folder: Path, job: Job) -> list[Ended]:
    return run_jobs(folder, [job])[0]


def succeeded(ranks: list[Ended]) -> list[Ended]:
    for rank in ranks:
        assert rank.code == 0, rank.log
    return ranks


def _ended(folder: Path, rank: int, code: int) -> Ended:
    said = folder / f"said-{rank}.json"
    found = json.loads(said.read_text()) if said.exists() else {}
    return Ended(code, found, (folder / f"log-{rank}").read_text())
