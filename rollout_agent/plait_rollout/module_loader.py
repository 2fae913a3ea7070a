"""Loads checkpoint folders into a torch module in this process."""

from pathlib import Path

from plait_client.checkpoint import CheckpointFolder
from plait_rollout.engine import ApplyReport
from plait_rollout.torch_module import TorchModuleEngine


class ModuleLoader:
    """The DirectoryLoader of a module: the reload path beside moving it in place."""

    def __init__(self, engine: TorchModuleEngine) -> None:
        self._engine = engine

    def load_directory(self, path: Path, stamp: str) -> ApplyReport:
        """See DirectoryLoader. The folder's tensors have the module's names."""
        return self._engine.load(CheckpointFolder(path), stamp)

    def version(self) -> str:
        """See DirectoryLoader."""
        return self._engine.version()

    def close(self) -> None:
        """See DirectoryLoader."""
        self._engine.close()
