"""Keys of stored objects: what a key may look like, and the keys of content-addressed objects.

An object's key is its digest and a nonce. The nonce makes every upload an object of its own, so
that deleting an old copy can never take away a newer one, and no store needs to offer an
exclusive write.
"""

import re
import secrets
from typing import Final

from plait.canonical import is_digest
from plait.errors import FormatError

KEY_BYTES_MAX: Final = 512  # stores allow 1024; the rest is for the prefix that a store's URL adds

# No component starts with a dot: that rules out `.`, `..` and the local store's temporary files.
# 255 bytes are what filesystems allow.
_COMPONENT: Final = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}"
_KEY: Final = re.compile(rf"{_COMPONENT}(?:/{_COMPONENT})*")
_NONCE: Final = re.compile(r"[A-Za-z0-9]{1,64}")
_OBJECT_KEY: Final = re.compile(r"sha256/([0-9a-f]{2})/([0-9a-f]{64})-[A-Za-z0-9]{1,64}")


def check_key(key: str) -> str:
    """The key itself, if a store may use it.

    Raises:
        FormatError: empty, too long, or anything that could leave the store's root.
    """
    if len(key) > KEY_BYTES_MAX or _KEY.fullmatch(key) is None:
        raise FormatError(
            f"store key {key[:KEY_BYTES_MAX]!r}; expected 1 to {KEY_BYTES_MAX} characters, parts of"
            " at most 255 letters, digits, '.', '_' and '-' between slashes, none starting with '.'"
            " or '-'"
        )
    return key


def object_key(digest: str, nonce: str | None = None) -> str:
    """`sha256/ab/ab…-NONCE` for `sha256:ab…`; a fresh random nonce unless one is given.

    Raises:
        FormatError: not a digest, or a nonce that isn't 1 to 64 letters and digits.
    """
    if not is_digest(digest):
        raise FormatError(f"{digest!r} is not a digest; expected sha256: and 64 hex digits")
    chosen = secrets.token_hex(8) if nonce is None else nonce
    if _NONCE.fullmatch(chosen) is None:
        raise FormatError(f"nonce {chosen!r}; expected 1 to 64 letters and digits")
    name = digest.removeprefix("sha256:")
    return f"sha256/{name[:2]}/{name}-{chosen}"


def digest_of_key(key: str) -> str:
    """The digest in a key that `object_key` made.

    Raises:
        FormatError: any other key.
    """
    match = _OBJECT_KEY.fullmatch(key)
    if match is None or not match[2].startswith(match[1]):
        raise FormatError(f"store key {key!r} names no digest; expected sha256/ab/ab…-NONCE")
    return f"sha256:{match[2]}"
