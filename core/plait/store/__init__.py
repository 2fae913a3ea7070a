"""The store: immutable objects by key. One port, and adapters for memory, folders and clouds."""

from plait.store.base import Store, StoredObject
from plait.store.fsspec import FsspecStore
from plait.store.keys import check_key, digest_of_key, object_key
from plait.store.local import LocalStore
from plait.store.memory import MemoryStore
from plait.store.opening import open_store

__all__ = [
    "FsspecStore",
    "LocalStore",
    "MemoryStore",
    "Store",
    "StoredObject",
    "check_key",
    "digest_of_key",
    "object_key",
    "open_store",
]
