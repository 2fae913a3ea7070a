"""From a URL to a store."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from plait.errors import UsageError
from plait.store.base import Store
from plait.store.fsspec import FsspecStore
from plait.store.local import LocalStore
from plait.store.memory import MemoryStore


def open_store(url: str, storage_options: Mapping[str, Any] | None = None) -> Store:
    """The store at a path, `file:///…`, `memory://`, `s3://…`, `gs://…`, `az://…` or `abfs://…`.

    Each `memory://` is a new, empty store. Bucket settings come from `storage_options`, or, if
    that is None, from the JSON object in the variable PLAIT_STORE_OPTIONS; other stores have none.

    Raises:
        UsageError: a URL of no known kind, or options for a store that takes none.
        NotInstalledError: names the extra to install.
        StoreError: a folder that can't be made.
    """
    if not url:
        raise UsageError("empty store URL; expected a folder, file://, s3://, gs:// or az://")
    protocol = match[1] if (match := re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", url)) else ""
    if protocol not in {"", "file", "memory"}:
        return FsspecStore(url, storage_options)
    if storage_options:
        raise UsageError(f"storage options given for {url!r}; only buckets take them")
    if protocol == "memory":
        if url != "memory://":
            raise UsageError(f"store URL {url!r}; a store in memory is memory:// alone")
        return MemoryStore()
    return LocalStore(_folder_of_url(url) if protocol else Path(url))


def _folder_of_url(url: str) -> Path:
    parts = urlsplit(url)
    if parts.netloc not in {"", "localhost"} or parts.query or parts.fragment or not parts.path:
        raise UsageError(f"store URL {url!r}; expected file:///absolute/folder")
    return Path(unquote(parts.path))
