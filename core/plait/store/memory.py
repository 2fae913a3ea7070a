"""A store in this process's memory, for tests and trials."""

import threading
import time
from collections.abc import Iterator

from plait.errors import ObjectMissing
from plait.store.base import Store, StoredObject, check_range, range_beyond
from plait.store.keys import check_key


class MemoryStore(Store):
    """Objects in a dictionary. Each instance is a store of its own and ends with the process."""

    def __init__(self) -> None:
        self.url = "memory://"
        self._objects: dict[str, tuple[bytes, float]] = {}
        self._lock = threading.Lock()

    def put(self, key: str, data: bytes) -> None:
        held = (bytes(data), time.time())
        with self._lock:
            self._objects[check_key(key)] = held

    def get(self, key: str) -> bytes:
        with self._lock:
            held = self._objects.get(check_key(key))
        if held is None:
            raise ObjectMissing(f"{key} is not in {self.url}")
        return held[0]

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_range(start, length)
        data = self.get(key)
        if start + length > len(data):
            raise range_beyond(self.url, key, start, length)
        return data[start : start + length]

    def size(self, key: str) -> int:
        return len(self.get(key))

    def delete(self, key: str) -> None:
        with self._lock:
            self._objects.pop(check_key(key), None)

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        with self._lock:
            held = tuple(self._objects.items())
        for key, (data, modified) in held:
            if key.startswith(prefix):
                yield StoredObject(key, len(data), modified)

    def sweep_temporary(self, older_than_seconds: float) -> int:  # noqa: ARG002 - the port's
        return 0
