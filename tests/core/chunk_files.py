"""Takes chunk files apart and together again, so that a test can break one thing at a time."""

import json
from collections.abc import Mapping
from typing import Any

from plait import canonical


def take_apart(data: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """The safetensors header, plait's directory in it, and the planes."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    return header, json.loads(header["__metadata__"]["plait"]), data[end:]


def put_together(header: object, directory: Mapping[str, Any] | str | None, planes: bytes) -> bytes:
    """A file of a header that holds this directory, or none if it is None."""
    if isinstance(header, dict) and directory is not None:
        text = directory if isinstance(directory, str) else canonical.serialize(directory).decode()
        header = header | {"__metadata__": {"plait": text}}
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + planes
