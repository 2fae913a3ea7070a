"""Reconstruction beside a stored copy, on one run: both must find the same, bit for bit."""

from collections.abc import Collection, Mapping
from typing import Any

import torch

from plait.cut import plain_cut
from plait.grain import SlottedCut
from plait.weights import Weights
from plait_trainer.detector import Capture, LiveTensors
from plait_trainer.live import TensorView, layout_of
from plait_trainer.partial_weights import SomeWeights
from plait_trainer.reconstruction import ReconstructionDetector
from plait_trainer.share import Share
from plait_trainer.snapshot import SnapshotDetector
from tests.trainer_agent.captures import assert_same_capture


class SideBySide:
    """A reconstruction detector and a snapshot detector that watch the same tensors.

    Args:
        tensors: by name, as they are published: views of parameters, or others.
        recalls: whether the kept state can be read back: from the snapshot.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        optimizer: torch.optim.Optimizer,
        dtype: torch.dtype = torch.bfloat16,
        *,
        dtypes: Mapping[str, torch.dtype] | None = None,
        recalls: bool = True,
        base: Weights | None = None,
        share: Share | None = None,
        **options: Any,
    ) -> None:
        self.tensors, self.dtype, self.dtypes = tensors, dtype, dtypes or {}
        self.snapshot = SnapshotDetector()
        self.detector = ReconstructionDetector(**options)
        self.recalled: list[str] = []
        live = self.live()
        layout = layout_of(live.values())
        cut = plain_cut(layout, for_anchor=False)
        self.share = share or Share.whole(layout, SlottedCut(cut, (0,) * len(cut.frames)))
        kept = self.snapshot.attach(live, self.share, base=base)
        assert kept == self.detector.attach(
            live, self.share, base=base, optimizer=optimizer,
            read_back=self.read_back if recalls else None,
        )  # fmt: skip

    def live(self) -> LiveTensors:
        return {
            name: TensorView(name, tensor.detach(), self.dtypes.get(name, self.dtype))
            for name, tensor in self.tensors.items()
        }

    def read_back(self, names: Collection[str]) -> Weights:
        self.recalled += names
        held = self.snapshot.captured
        return SomeWeights(held.layout, {name: held.bits(name).copy() for name in names})

    def publish(self, *, keep: bool = True) -> Capture:
        """Both captures, which must be equal; returns the reconstructed one."""
        wanted, found = (each.capture(self.live()) for each in (self.snapshot, self.detector))
        assert_same_capture(found, wanted)
        if keep:
            self.snapshot.keep(wanted)
            self.detector.keep(found)
        return found

    def changed(self) -> int:
        """Elements that a publish finds changed."""
        return sum(delta.count for delta in self.publish().deltas.values())


def parameters(seed: int = 0, **shapes: tuple[int, ...]) -> dict[str, torch.nn.Parameter]:
    """Weights like a model's: a hundredth of them tiny, some zero."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in (shapes or {"a": (70, 1000), "b": (33,), "c": (5, 7, 11)}).items():
        weights = torch.randn(shape, generator=generator) * 0.02
        flat = weights.view(-1)
        flat[: flat.numel() // 100 + 1] *= 1e-4
        flat[-2:] = torch.tensor([0.0, -0.0])[-flat.numel() :]
        found[name] = torch.nn.Parameter(weights)
    return found


class Gradients:
    """Gradients with a drift and noise over many magnitudes."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], seed: int = 1) -> None:
        self._tensors = tensors
        self._random = torch.Generator().manual_seed(seed)
        self._drift = {n: self._normal(t) for n, t in tensors.items()}

    def give(self, *, without: Collection[str] = ()) -> None:
        for name, tensor in self._tensors.items():
            noise = self._drift[name] * 0.3 + self._normal(tensor)
            gradient = noise * 1e-3 * self._normal(tensor).exp()
            tensor.grad = None if name in without else gradient

    def _normal(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=self._random)
