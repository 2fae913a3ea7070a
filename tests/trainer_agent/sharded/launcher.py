"""Forks the processes of training jobs: `python -m tests.trainer_agent.sharded.launcher FOLDER`.

Nothing is running in this process yet when it forks: what it has imported is all that they share.
"""

import json
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from plait.errors import PlaitError
from tests.trainer_agent.sharded.mixtures import mixture_steps
from tests.trainer_agent.sharded.scenarios import SCENARIOS, Process

# The exit code of a process that ended with a typed error.
TOLD = 3


def run(job: dict[str, Any]) -> list[int]:
    """Exit codes by rank; negative: the signal that killed it."""
    children = [os.fork() or be(rank, job) for rank in range(job["size"])]
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def be(rank: int, job: dict[str, Any]) -> int:
    """This process is one of the job's: it never comes back."""
    logs = Path(job["logs"])
    log = os.open(logs / f"log-{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        code = live(rank, job, logs)
    except BaseException:  # noqa: BLE001 (it must not go on as the launcher)
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def live(rank: int, job: dict[str, Any], logs: Path) -> int:
    os.environ["PLAIT_FAILPOINT"] = job["failpoints"].get(str(rank), "")
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    size = job["size"]
    torch.set_num_threads(1)
    if size > 1:
        store = torch.distributed.FileStore(str(logs / "store"), size)  # type: ignore[attr-defined]
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    process = Process(rank, size, Path(job["folder"]))
    try:
        scenarios = {**SCENARIOS, "mixture_steps": mixture_steps}
        scenarios[job["scenario"]](process, **job["arguments"])
    except PlaitError as error:
        traceback.print_exc()
        process.said |= {"error": error.code, "message": str(error)}
    (logs / f"said-{rank}.json").write_text(json.dumps(process.said))
    if "error" in process.said:
        return TOLD
    if size > 1:
        distributed.barrier()
        distributed.destroy_process_group()
    return 0


def main(folder: Path) -> None:
    codes = [run(job) for job in json.loads((folder / "jobs.json").read_text())]
    (folder / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
