"""What a JSON text would make, told from its bytes before a parser builds any of it.

A parser of JSON recurses, and makes an object of every two bytes: without these numbers its
caller's stack would decide what it reads, and the sender how much memory it takes.
"""

from typing import Any

import numpy as np
from numba import njit

_QUOTE = ord('"')
_BACKSLASH = ord("\\")
_COMMA = ord(",")
_OPENING = (ord("["), ord("{"))
_CLOSING = (ord("]"), ord("}"))


def shape_of(text: bytes) -> tuple[int, int]:
    """How deep lists and objects are nested, and the commas and opening brackets.

    Of a text that is no JSON these are some numbers: not less than what a parser builds of it
    before it finds out.

    Args:
        text: UTF-8.
    """
    depth, values = _scan(np.frombuffer(text, np.uint8))
    return int(depth), int(values)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _scan(text: Any) -> Any:
    depth, deepest, values = 0, 0, 0
    at = 0
    while at < text.size:
        byte = text[at]
        if byte == _QUOTE:
            at += 1
            while at < text.size and text[at] != _QUOTE:
                at += 2 if text[at] == _BACKSLASH else 1
        elif byte == _COMMA:
            values += 1
        elif byte in _OPENING:
            values += 1
            depth += 1
            deepest = max(deepest, depth)
        elif byte in _CLOSING:
            depth -= 1
        at += 1
    return deepest, values
