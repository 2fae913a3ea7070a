"""The Range header (RFC 9110): one range of bytes, or none."""

import re
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from plait.errors import RequestRejected
from plait_server.problems import StatusError

_RANGE: Final = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes from `start` up to, not including, `end`."""

    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start


def parse_range(header: str | None, size: int) -> ByteRange | None:
    """The range asked for; None where the whole is to be sent.

    A header of another unit, of several ranges, or that can't be read is ignored, as RFC 9110
    allows.

    Raises:
        StatusError: 416, the range begins beyond the end.
    """
    match = _RANGE.fullmatch(header.strip()) if header else None
    if match is None or match[0] == "bytes=-":
        return None
    first, last = match[1], match[2]
    if not first:
        found = ByteRange(max(size - int(last), 0), size)
    else:
        end = min(int(last) + 1, size) if last else size
        if last and int(last) < int(first):
            return None
        found = ByteRange(int(first), end)
    if found.start >= size or found.length <= 0:
        raise StatusError(
            RequestRejected(f"range {header!r} of a chunk of {size} bytes"),
            HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
            {"content-range": f"bytes */{size}"},
        )
    return found
