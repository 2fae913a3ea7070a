"""The client: the registry as Python calls, verified downloads, checkouts, the `plait` command.

Names are imported on first use: `plait --help` must not wait for what they need.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from plait_client.cache import ChunkCache
    from plait_client.checkpoint import CheckpointFolder
    from plait_client.fetch import Fetcher
    from plait_client.registry import RegistryClient

__version__ = version("plait")

__all__ = ["CheckpointFolder", "ChunkCache", "Fetcher", "RegistryClient"]

_MODULE_OF: Final = {
    "CheckpointFolder": "checkpoint",
    "ChunkCache": "cache",
    "Fetcher": "fetch",
    "RegistryClient": "registry",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
