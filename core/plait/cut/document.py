"""The document of a cut: its frames in order, which are read and written here."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from plait import canonical
from plait.cut.fit import check_fit
from plait.cut.frame import FrameSpec, Segment
from plait.errors import DocumentInvalid, LimitExceeded
from plait.layout import Layout, words_per_item
from plait.limits import FRAMES_MAX, RUNS_PER_CUT_MAX, SEGMENTS_PER_FRAME_MAX

FORMAT: Final = "plait-cut/1"


@dataclass(frozen=True)
class Cut:
    """Every frame of a layout, or of the part of it that is published.

    Raises:
        LimitExceeded: more frames or runs than limits.py allows.
    """

    layout_digest: str
    frames: tuple[FrameSpec, ...]

    def __post_init__(self) -> None:
        if len(self.frames) > FRAMES_MAX:
            raise LimitExceeded(f"cut of {len(self.frames)} frames; at most {FRAMES_MAX}")
        runs = sum(segment.repeats for frame in self.frames for segment in frame.segments)
        if runs > RUNS_PER_CUT_MAX:
            raise LimitExceeded(f"cut of {runs} runs; at most {RUNS_PER_CUT_MAX}")

    @cached_property
    def data(self) -> bytes:
        """Canonical bytes."""
        return canonical.serialize(self.to_document())

    @cached_property
    def digest(self) -> str:
        return canonical.digest_of(self.data)

    def serialize(self) -> bytes:
        return self.data

    def to_document(self) -> dict[str, Any]:
        frames = [
            [frame.item_bytes, [[s.first_word, s.run, s.stride, s.repeats] for s in frame.segments]]
            for frame in self.frames
        ]
        return {"format": FORMAT, "requires": [], "layout": self.layout_digest, "frames": frames}

    @classmethod
    def parse(cls, data: bytes | str) -> "Cut":
        """A cut from its canonical bytes. `check_against` proves that it fits a layout.

        Raises:
            DocumentInvalid, UnsupportedFormat, LimitExceeded: see those classes.
        """
        document = canonical.parse(data, expected_format=FORMAT)
        if set(document) != {"format", "requires", "layout", "frames"}:
            raise DocumentInvalid("a cut has the fields format, requires, layout, frames")
        if not canonical.is_digest(document["layout"]):
            raise DocumentInvalid(f"a cut's layout is a digest, got {document['layout']!r:.80}")
        if not isinstance(document["frames"], list):
            raise DocumentInvalid("a cut's frames are a list")
        canonical.check_length(document["frames"], FRAMES_MAX, "frames")
        return cls(document["layout"], tuple(map(_parse_frame, document["frames"])))

    def check_against(self, layout: Layout) -> None:
        """Proves that every frame reads whole items of its size, each word at most once.

        A segment of one run may cross adjacent tensors of one item size; one of more runs lies
        within one tensor.

        Raises:
            DocumentInvalid: it is another layout's cut, or breaks one of these rules.
        """
        if self.layout_digest != layout.digest:
            raise DocumentInvalid(
                f"the cut belongs to layout {self.layout_digest}, not to {layout.digest}"
            )
        check_fit(self.frames, layout)

    def covers(self, layout: Layout) -> bool:
        """Whether every word of the layout occurs exactly once, as an anchor needs.

        Raises:
            DocumentInvalid: as `check_against`.
        """
        self.check_against(layout)
        words = sum(frame.items * words_per_item(frame.item_bytes) for frame in self.frames)
        return words == layout.total_words


def _parse_frame(row: object) -> FrameSpec:
    match row:
        case [int(item_bytes), list(segments)] if type(item_bytes) is int:
            canonical.check_length(segments, SEGMENTS_PER_FRAME_MAX, "segments of a frame")
            return FrameSpec(item_bytes, tuple(map(_parse_segment, segments)))
    raise DocumentInvalid(f"a cut's frame must be [item bytes, segments], got {str(row)[:120]}")


def _parse_segment(row: object) -> Segment:
    if not isinstance(row, list) or len(row) != 4 or any(type(number) is not int for number in row):
        raise DocumentInvalid(
            f"a segment must be [first word, run, stride, repeats], got {str(row)[:120]}"
        )
    return Segment(*row)
