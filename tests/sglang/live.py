"""A live engine under test, its checkpoint, and ways to look inside."""

import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from plait.cut import Cut, plain_cut
from plait.layout import Layout
from plait.weights import Weights
from plait_rollout.engine import Move, MoveStep
from plait_rollout.sglang.adapter import SglangEngine
from plait_rollout.sglang.http import SglangApi
from plait_rollout.sglang.launch import RunningEngine, launch_engine
from tests.sglang.tiny import State, changed, layout_of, make_tiny, move_of, read_state

ROOT = Path(__file__).parents[2]
PROMPT = list(range(10, 22))
TEST_LOADERS = ("tests.sglang.loaders.dump", "tests.sglang.loaders.disturb")


@dataclass
class Live:
    """An engine that was started on version A, and some other versions' weights."""

    running: RunningEngine
    folder: Path
    tp: int
    model: Path
    a: State
    b: State
    c: State
    d: State

    @property
    def layout(self) -> Layout:
        return layout_of(self.a)

    @property
    def cut(self) -> Cut:
        return plain_cut(self.layout, for_anchor=False)

    @property
    def chunks(self) -> Path:
        return self.folder / "chunks"

    def move(self, *steps: MoveStep, stamp: str = "policy@2#2") -> Move:
        return move_of(self.layout, self.cut, steps, stamp)

    def call(self, loader: str, text: str, *, resume: bool = True) -> None:
        """Calls a loader in every rank, with the engine paused."""
        api = SglangApi(self.running.url)
        api.pause("in_place")
        try:
            api.update_from_tensor(loader, text.encode(), ranks=self.tp, flush_cache=False)
        finally:
            if resume:
                api.resume()
            api.close()

    def dump(self) -> dict[str, Any]:
        """Raw bits of all live tensors, `rank/name` → int array."""
        path = self.folder / f"dump-{uuid.uuid4().hex}"
        self.call(TEST_LOADERS[0], str(path))
        return {
            f"{rank}/{name}": tensor.contiguous().view(-1).view(torch.uint8).numpy()
            for rank in range(self.tp)
            for name, tensor in torch.load(f"{path}.{rank}").items()
        }

    def disturb(self, command: str, *, resume: bool = True) -> None:
        self.call(TEST_LOADERS[1], command, resume=resume)

    def checksums(self) -> Any:
        answer = httpx.post(
            f"{self.running.url}/weights_checker", json={"action": "checksum"}, timeout=60
        )
        return answer.raise_for_status().json()

    def generate(self, tokens: int = 24, **more: Any) -> dict[str, Any]:
        body = {
            "input_ids": PROMPT,
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
            "return_logprob": True,
            **more,
        }
        answer = httpx.post(f"{self.running.url}/generate", json=body, timeout=300)
        found: dict[str, Any] = answer.raise_for_status().json()
        return found

    def said(self) -> Any:
        """Greedy ids and their logprobs."""
        return [row[:2] for row in self.generate()["meta_info"]["output_token_logprobs"]]

    def load_from_disk(self, folder: Path) -> None:
        api = SglangApi(self.running.url)
        api.update_from_disk(str(folder))
        api.close()

    def adapter(self, unheld: Weights | None = None) -> closing[SglangEngine]:
        """An adapter that isn't attached yet, closed at the end of the `with`."""
        return closing(SglangEngine(self.running.url, self.running.spool, unheld))

    @contextmanager
    def attached(self) -> Iterator[SglangEngine]:
        with self.adapter() as engine:
            engine.attach(self.layout)
            yield engine


def start(folder: Path, kind: str, *, tie: bool, tp: int, port: int | None = None) -> Live:
    """Starts an engine; in a folder where one was started before, on the same checkpoint."""
    model = make_tiny(folder / "a", kind, tie=tie) if not (folder / "a").exists() else folder / "a"
    a = read_state(model)
    b = changed(a, seed=1)
    c = changed(b, seed=2)
    running = launch_engine(
        model,
        tp=tp,
        spool=folder / "spool",
        port=port,
        extra=["--custom-weight-loader", *TEST_LOADERS],
        environment={"PYTHONPATH": str(ROOT)},
    )
    return Live(running, folder, tp, model, a, b, c, changed(c, seed=3))


def differing(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Names whose bits differ."""
    assert first.keys() == second.keys()
    return [name for name in first if not np.array_equal(first[name], second[name])]
