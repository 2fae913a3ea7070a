"""The port: what plait asks of a store, and nothing more."""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from plait.errors import SizeMismatch, StoreError, UsageError

_PROBE: Final = b"plait store probe\n"


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object as a listing shows it.

    Attributes:
        key: relative to the store.
        size: in bytes.
        modified: seconds since the epoch, by the store's own clock.
    """

    key: str
    size: int
    modified: float


class Store(ABC):
    """Immutable objects by key.

    An object is written once, under a key that nobody else uses (`object_key`), and is there whole
    or not at all. Writing a key again replaces the object whole. Every method may be called from
    any thread, also at the same time, and blocks; call none of them in an event loop. Errors of
    every adapter: FormatError for a key that no store may use (before anything is touched),
    ObjectMissing, StoreUnavailable (the same call may be made again), NoSpace, StoreError for the
    rest.

    Attributes:
        url: where it is, without credentials.
    """

    url: str

    @abstractmethod
    def put(self, key: str, data: bytes) -> None:
        """Write an object. Durable once this returns; no reader ever sees a part of it."""

    @abstractmethod
    def get(self, key: str) -> bytes:
        """The whole object.

        Raises:
            ObjectMissing: no such key.
        """

    @abstractmethod
    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Exactly `length` bytes from byte `start` on.

        Raises:
            ObjectMissing: no such key.
            SizeMismatch: the object doesn't reach that far.
            UsageError: a negative number.
        """

    @abstractmethod
    def size(self, key: str) -> int:
        """The object's size in bytes.

        Raises:
            ObjectMissing: no such key.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove an object; one that isn't there is no error."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        """Every whole object whose key starts with `prefix`, in no particular order.

        The answer is read from the store as it is asked for, never from a cache. An object that is
        written or deleted meanwhile may or may not be among them.
        """

    @abstractmethod
    def sweep_temporary(self, older_than_seconds: float) -> int:
        """Remove what writers that died left behind and no listing shows; returns how many.

        A write that is slower than the given age fails with StoreUnavailable.
        """

    def check(self) -> None:
        """Write, read and delete a probe object.

        Raises:
            StoreError: what the store can't do.
        """
        key = f"probe/{secrets.token_hex(16)}"
        self.put(key, _PROBE)
        try:
            held = self.get(key)
        finally:
            self.delete(key)
        if held != _PROBE:
            raise StoreError(f"{self.url} gave back other bytes than were written to {key}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


def check_range(start: int, length: int) -> None:
    if start < 0 or length < 0:
        raise UsageError(f"byte range from {start}, {length} long; expected no negative number")


def range_beyond(url: str, key: str, start: int, length: int) -> SizeMismatch:
    return SizeMismatch(f"{key} in {url} ends before byte {start + length}, which was asked for")
