"""The trainer agent: captures what an optimizer changed, and publishes it as versions."""

from plait_trainer.choice import AutoDetector
from plait_trainer.copy_back import CopyBackDetector
from plait_trainer.detector import Capture, Detector
from plait_trainer.future import PublishFuture, PublishMetrics
from plait_trainer.live import LiveTensor, TensorSource, TensorView
from plait_trainer.loop import PublishingLoop
from plait_trainer.publisher import Publisher
from plait_trainer.reconstruction import ReconstructionDetector
from plait_trainer.snapshot import SnapshotDetector

__all__ = [
    "AutoDetector",
    "Capture",
    "CopyBackDetector",
    "Detector",
    "LiveTensor",
    "PublishFuture",
    "PublishMetrics",
    "Publisher",
    "PublishingLoop",
    "ReconstructionDetector",
    "SnapshotDetector",
    "TensorSource",
    "TensorView",
]
