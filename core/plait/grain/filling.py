"""Frames that fill up as segments come in."""

from collections import deque
from collections.abc import Iterator

from plait.cut import FrameSpec, Segment, items_max
from plait.grain.runs import run_of, runs_of
from plait.layout import words_per_item


class Filling:
    """One slot's frames of one item size, as segments come in."""

    def __init__(self, item_bytes: int, for_anchor: bool) -> None:
        self._item_bytes = item_bytes
        self._width = words_per_item(item_bytes)
        self._most = self._room = items_max(item_bytes, dense=for_anchor)
        self._segments: list[Segment] = []

    def add(self, segment: Segment) -> Iterator[FrameSpec]:
        """Takes a segment in; yields the frames that are full with it."""
        parts = deque([segment])
        while parts:
            part = parts.popleft()
            head, rest = self._split(part)
            if head is not None:
                self._append(head)
            parts.extendleft(reversed(rest))
            if head is None or not self._room:
                yield from self.last()

    def last(self) -> Iterator[FrameSpec]:
        """The frame begun, if there is one."""
        if self._segments:
            yield FrameSpec(self._item_bytes, tuple(self._segments))
            self._segments, self._room = [], self._most

    def _split(self, segment: Segment) -> tuple[Segment | None, list[Segment]]:
        """What still fits into the frame, in whole runs where there are several; and the rest."""
        if segment.items <= self._room:
            return segment, []
        first, run, stride, repeats = (
            segment.first_word, segment.run, segment.stride, segment.repeats,
        )  # fmt: skip
        if repeats == 1:
            room = self._room
            return run_of(first, room), [run_of(first + room * self._width, run - room)]
        fits = self._room // run
        if not fits and not self._segments:
            return None, [run_of(first, run), runs_of(first + stride, run, stride, repeats - 1)]
        rest = runs_of(first + fits * stride, run, stride, repeats - fits)
        return (runs_of(first, run, stride, fits) if fits else None), [rest]

    def _append(self, segment: Segment) -> None:
        last = self._segments[-1] if self._segments else segment
        if (
            last.repeats == segment.repeats == 1
            and last.first_word + last.run * self._width == segment.first_word
        ):
            self._segments.pop()
            self._room += last.run
            segment = run_of(last.first_word, last.run + segment.run)
        self._segments.append(segment)
        self._room -= segment.items
