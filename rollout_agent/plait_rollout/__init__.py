"""The rollout agent: followers, the Engine port, and the engines behind it.

Names are imported on first use: an engine's own process, which imports a part of this package,
needs neither the client nor what the client needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from plait_rollout.directory import DirectoryReplica
    from plait_rollout.engine import Engine, Move, MoveStep
    from plait_rollout.follower import Follower, FollowOptions
    from plait_rollout.in_place import InPlaceReplica
    from plait_rollout.local_api import LocalApi
    from plait_rollout.module_loader import ModuleLoader
    from plait_rollout.reload import ReloadReplica
    from plait_rollout.replica import DirectoryLoader, Replica
    from plait_rollout.source import DeltaSource
    from plait_rollout.status import Status
    from plait_rollout.torch_module import TorchModuleEngine

__all__ = [
    "DeltaSource",
    "DirectoryLoader",
    "DirectoryReplica",
    "Engine",
    "FollowOptions",
    "Follower",
    "InPlaceReplica",
    "LocalApi",
    "ModuleLoader",
    "Move",
    "MoveStep",
    "ReloadReplica",
    "Replica",
    "Status",
    "TorchModuleEngine",
]

_MODULE_OF: Final = {
    "DeltaSource": "source",
    "DirectoryLoader": "replica",
    "DirectoryReplica": "directory",
    "Engine": "engine",
    "FollowOptions": "follower",
    "Follower": "follower",
    "InPlaceReplica": "in_place",
    "LocalApi": "local_api",
    "ModuleLoader": "module_loader",
    "Move": "engine",
    "MoveStep": "engine",
    "ReloadReplica": "reload",
    "Replica": "replica",
    "Status": "status",
    "TorchModuleEngine": "torch_module",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
