"""A registry's address as messages show it: without the user and password that it may hold."""

import re
from typing import Final

# Greedy: a password that nobody encoded may itself hold `/` or `@`.
_CREDENTIALS: Final = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*://)?.*@", re.DOTALL)


def shown(url: str) -> str:
    """The address, with `***` in place of what stands before its host."""
    return _CREDENTIALS.sub(r"\1***@", url, count=1)
