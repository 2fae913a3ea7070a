"""Which head to believe: generations only grow within one epoch of the registry."""

import threading

from plait.errors import LineageError
from plait.wire import ChannelDocument
from plait_rollout.memory import Memory


class Heads:
    """The newest head of a channel that a follower has seen, also over restarts.

    Attributes:
        head: the last accepted one; None before the first.
        generation: of it, or the remembered one.
    """

    def __init__(self, seen: Memory | None) -> None:
        self.head: ChannelDocument | None = None
        self.generation = seen.generation if seen else 0
        self._epoch = seen.epoch if seen else None
        self._lock = threading.Lock()

    def accept(self, head: ChannelDocument, *, asked_at: int) -> ChannelDocument:
        """Takes a head if it is newer than the one before; returns the newest.

        A rollback is newer: its generation is larger, though its seq is smaller. A registry with
        another epoch is another database; its generations start anew.

        Args:
            asked_at: `generation` when the registry was asked. Another thread may have got a newer
                answer since, which makes this one late, not wrong.
        Raises:
            LineageError: an older generation, or another version under a generation seen before.
        """
        with self._lock:
            if self.head is None or self._is_newer(head, self.head, asked_at):
                self._refuse_old(head, asked_at)
                self.head = head
                self._epoch, self.generation = head.epoch, head.generation
            return self.head

    def _is_newer(self, head: ChannelDocument, before: ChannelDocument, asked_at: int) -> bool:
        if head.epoch != before.epoch:
            return True
        self._refuse_old(head, asked_at)
        same = head.version_digest == before.version_digest
        if head.generation == before.generation and not same:
            raise LineageError(
                f"the registry offers version {head.seq} as generation {head.generation} "
                f"of {head.channel!r}, which was version {before.seq}",
                remedy="ignored: do two registries answer at one address?",
            )
        return head.generation > before.generation

    def _refuse_old(self, head: ChannelDocument, asked_at: int) -> None:
        if head.epoch == self._epoch and head.generation < asked_at:
            raise LineageError(
                f"the registry offers generation {head.generation} of {head.channel!r} "
                f"(version {head.seq}); generation {asked_at} was seen already",
                remedy="ignored: was the registry's database restored from an older backup?",
            )
