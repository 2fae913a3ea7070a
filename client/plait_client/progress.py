"""The progress port: how long work tells whoever watches that it moves on."""

from typing import Protocol


class Progress(Protocol):
    """Told about bytes, from any thread."""

    def begin(self, task: str, total: int) -> None:
        """A task of `total` bytes starts; it replaces the one before."""

    def advance(self, amount: int) -> None:
        """`amount` more bytes of the running task are done."""


class Silent:
    """Watches nothing."""

    def begin(self, task: str, total: int) -> None:
        pass

    def advance(self, amount: int) -> None:
        pass


SILENT = Silent()
