"""Names that come from outside: of policies, channels and replicas, and of side files."""

from typing import Final

from plait.errors import DocumentInvalid
from plait.limits import NAME_BYTES_MAX, SIDE_FILE_NAME_BYTES_MAX

_WEIGHTS_INDEX: Final = "model.safetensors.index.json"


def check_name(name: object, noun: str) -> str:
    """A policy, channel or replica name: letters, digits, `.`, `_`, `-`; not a number.

    Raises:
        DocumentInvalid: anything else. A REF like `41` or `main~3` must stay unambiguous.
    """
    if not isinstance(name, str) or not 0 < len(name) <= NAME_BYTES_MAX:
        raise DocumentInvalid(f"a {noun} name has 1 to {NAME_BYTES_MAX} characters: {name!r:.80}")
    plain = name.replace(".", "").replace("_", "").replace("-", "")
    if not (name.isascii() and plain.isalnum() and name[0].isalnum()) or name.isdigit():
        raise DocumentInvalid(
            f"{name!r} can't name a {noun}: letters, digits, '.', '_' and '-' only, "
            "a letter or digit first, and not a number"
        )
    return name


def check_side_file_name(name: object) -> str:
    """A relative path of plain components, so that no checkout can write outside its folder.

    Raises:
        DocumentInvalid: anything else.
    """
    if not isinstance(name, str) or not 0 < _utf8_size(name) <= SIDE_FILE_NAME_BYTES_MAX:
        raise DocumentInvalid(
            f"a side file's name has 1 to {SIDE_FILE_NAME_BYTES_MAX} bytes of UTF-8: {name!r:.80}"
        )
    parts = name.split("/")
    hidden_journal = parts[0] == ".plait"
    # A checkout would take them for weights.
    weights = len(parts) == 1 and (name.endswith(".safetensors") or name == _WEIGHTS_INDEX)
    odd = "\\" in name or "\0" in name or any(part in ("", ".", "..") for part in parts)
    if hidden_journal or weights or odd:
        raise DocumentInvalid(f"{name!r} can't be a side file's name")
    return name


def _utf8_size(text: str) -> int:
    """Bytes; 0 for text that UTF-8 can't hold (an ill-encoded name of a file, as Python has it)."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return 0
