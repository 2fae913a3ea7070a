"""A store in a bucket, through fsspec: S3 and what speaks it, Google Cloud Storage, Azure.

fsspec's conveniences are turned off on purpose. A cached listing hides what another process
wrote, a cached instance keeps expired credentials, and a file handle that is closed by an error
publishes half an object; so nothing is cached, and an object is one `pipe_file`.
"""

import contextlib
import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, Final, TypeVar

from plait.errors import (
    NoSpace,
    NotInstalledError,
    ObjectMissing,
    PlaitError,
    SizeMismatch,
    StoreError,
    StoreUnavailable,
    UsageError,
)
from plait.store import faults
from plait.store.base import Store, StoredObject, check_range, range_beyond
from plait.store.keys import check_key

OPTIONS_VARIABLE: Final = "PLAIT_STORE_OPTIONS"
EXTRA_OF_PROTOCOL: Final[Mapping[str, str]] = {
    "s3": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "az": "azure",
    "abfs": "azure",
    "abfss": "azure",
}

_FIRST_PAUSE_SECONDS: Final = 0.1
_LONGEST_PAUSE_SECONDS: Final = 5.0
_MODIFIED_FIELDS: Final = ("LastModified", "last_modified", "mtime", "updated", "created")

# One request per whole object (s3fs would ask for the size first, to fetch large ones in parts),
# and no retries in the library: this file's are the only ones, so their number is bounded.
_S3_DEFAULTS: Final[Mapping[str, Any]] = {
    "max_concurrency": 1,
    "config_kwargs": {
        "connect_timeout": 10,
        "read_timeout": 60,
        "max_pool_connections": 32,
        "retries": {"total_max_attempts": 1},
    },
}

_Result = TypeVar("_Result")


class FsspecStore(Store):
    """Objects below `s3://bucket/prefix`, `gs://…` or `az://…`.

    Requests that meet throttling, a reset or a timeout are made again, `attempts` times in all,
    with pauses that double from 0.1 to at most 5 seconds, each with full jitter. A request that is
    denied is made once more with a filesystem made anew, which reads credentials afresh. Make the
    store in the process that uses it: fsspec's connections don't survive a fork.
    """

    def __init__(
        self,
        url: str,
        storage_options: Mapping[str, Any] | None = None,
        *,
        attempts: int = 6,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """Open a bucket; sends no request.

        Args:
            url: protocol, bucket and prefix; credentials and settings don't belong in it.
            storage_options: what the fsspec filesystem takes (`endpoint_url`, `key`, `secret`,
                `profile`…); if None, the JSON object in the variable PLAIT_STORE_OPTIONS, read
                again whenever the filesystem is made anew.
            attempts: how often one request is made at most while it meets passing faults.
            pause: waits for the given seconds.

        Raises:
            UsageError: a URL without bucket, of another protocol, or with a query or a password;
                options that aren't a JSON object.
            NotInstalledError: fsspec or the protocol's library is missing.
        """
        self.url = url.rstrip("/")
        self._protocol, self._root = _parts_of_url(self.url)
        self._options = storage_options
        self._attempts = attempts
        self._pause = pause
        self._lock = threading.Lock()
        self._filesystem = self._connect()

    def put(self, key: str, data: bytes) -> None:
        path = self._path(key)
        body = bytes(data)
        self._request(f"write {key}", lambda files: files.pipe_file(path, body))
        held = self.size(key)
        if held != len(body):
            self.delete(key)
            raise SizeMismatch(f"{self.url} kept {held} of the {len(body)} bytes of {key}")

    def get(self, key: str) -> bytes:
        path = self._path(key)
        data = self._request(f"read {key}", lambda files: files.cat_file(path), missing=key)
        return bytes(data)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_range(start, length)
        path = self._path(key)
        if length == 0:
            # HTTP has no empty range.
            if start > self.size(key):
                raise range_beyond(self.url, key, start, length)
            return b""
        try:
            data = self._request(
                f"read {key}",
                lambda files: files.cat_file(path, start=start, end=start + length),
                missing=key,
            )
        except StoreError as error:
            if faults.is_range_beyond(error):
                raise range_beyond(self.url, key, start, length) from error
            raise
        if len(data) != length:
            raise range_beyond(self.url, key, start, length)
        return bytes(data)

    def size(self, key: str) -> int:
        path = self._path(key)
        found = self._request(f"look at {key}", lambda files: files.info(path), missing=key)
        if found["type"] != "file":
            raise ObjectMissing(f"{key} is not in {self.url}")
        return int(found["size"])

    def delete(self, key: str) -> None:
        path = self._path(key)
        # Some stores say that there was nothing to delete, S3 doesn't.
        with contextlib.suppress(ObjectMissing):
            self._request(f"delete {key}", lambda files: files.rm_file(path), missing=key)

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        folder = prefix.rpartition("/")[0]
        start = self._path(folder) if folder else self._root
        for found in self._files(start):
            key = str(found["name"]).removeprefix(f"{self._root}/")
            if key.startswith(prefix):
                yield StoredObject(key, int(found["size"]), self._modified(found))

    def sweep_temporary(self, older_than_seconds: float) -> int:  # noqa: ARG002 - the port's
        # A request leaves nothing behind; unfinished multipart uploads are the bucket's to expire.
        return 0

    def _files(self, folder: str) -> Iterator[Mapping[str, Any]]:
        """Every file below a folder, one folder's listing at a time."""
        try:
            entries = self._request(
                "list", lambda files: files.ls(folder, detail=True), missing=folder
            )
        except ObjectMissing as error:
            if folder == self._root and "/" not in folder:
                raise self._bucket_missing() from error
            return
        for entry in entries:
            if str(entry["name"]).rstrip("/") == folder:
                continue  # the empty object that some tools make to show a folder
            if entry["type"] == "directory":
                yield from self._files(str(entry["name"]).rstrip("/"))
            else:
                yield entry

    def _modified(self, found: Mapping[str, Any]) -> float:
        for field in _MODIFIED_FIELDS:
            value = found.get(field)
            if isinstance(value, str):
                value = datetime.fromisoformat(value)
            if isinstance(value, datetime):
                return value.timestamp()
            if isinstance(value, int | float):
                return float(value)
        raise StoreError(f"{self.url}: the listing of {found['name']} has no time of change")

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    def _request(
        self, action: str, call: Callable[[Any], _Result], *, missing: str = ""
    ) -> _Result:
        """Make one request, and again as the class says; `missing` names what it reads."""
        renewed = False
        failures = 0
        while True:
            filesystem = self._filesystem
            try:
                return call(filesystem)
            except FileNotFoundError as error:
                if not missing or faults.is_bucket_missing(error):
                    raise self._bucket_missing() from error
                raise ObjectMissing(f"{missing} is not in {self.url}") from error
            except Exception as error:
                if faults.may_be_credentials(error) and not renewed:
                    renewed = True
                    self._renew(filesystem)
                    continue
                failures += 1
                if not faults.is_passing(error) or failures >= self._attempts:
                    raise self._meaning(action, error, failures) from error
            limit = min(_FIRST_PAUSE_SECONDS * 2 ** (failures - 1), _LONGEST_PAUSE_SECONDS)
            self._pause(random.uniform(0, limit))

    def _meaning(self, action: str, error: Exception, failures: int) -> PlaitError:
        message = f"{self.url}: cannot {action}: {type(error).__name__}: {error}"
        if faults.is_full(error):
            return NoSpace(message, remedy="free space, or raise the quota")
        if faults.is_passing(error):
            return StoreUnavailable(f"{message}, {failures} times")
        if faults.may_be_credentials(error):
            return StoreError(message, remedy="check the credentials and the bucket's policy")
        return StoreError(message)

    def _bucket_missing(self) -> StoreError:
        return StoreError(f"{self.url}: no such bucket", remedy="make the bucket first")

    def _renew(self, stale: Any) -> None:
        """Put a new filesystem in the stale one's place, unless another thread just did."""
        with self._lock:
            if self._filesystem is stale:
                self._filesystem = self._connect()

    def _connect(self) -> Any:
        options = dict(self._options if self._options is not None else options_from_environment())
        if self._protocol == "s3":
            config = {**_S3_DEFAULTS["config_kwargs"], **options.get("config_kwargs", {})}
            options = {**_S3_DEFAULTS, **options, "config_kwargs": config}
        options.update(use_listings_cache=False, skip_instance_cache=True)
        try:
            import fsspec

            filesystem = fsspec.filesystem(self._protocol, **options)
        except ImportError as error:
            extra = EXTRA_OF_PROTOCOL[self._protocol]
            raise NotInstalledError(
                f"{self._protocol}:// needs a library that isn't installed: {error}",
                remedy=f"pip install 'plait[{extra}]'",
            ) from error
        except TypeError as error:
            raise UsageError(f"{self.url}: storage options don't fit: {error}") from error
        if self._protocol == "s3":
            filesystem.retries = 1
        return filesystem


def options_from_environment() -> dict[str, Any]:
    """The JSON object in PLAIT_STORE_OPTIONS; empty if it isn't set.

    Raises:
        UsageError: anything else. The value isn't shown: it may hold credentials.
    """
    text = os.environ.get(OPTIONS_VARIABLE, "")
    if not text:
        return {}
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise UsageError(f"{OPTIONS_VARIABLE} is not a JSON object")
    return options


def _parts_of_url(url: str) -> tuple[str, str]:
    """Protocol, and bucket with prefix."""
    protocol, _, rest = url.partition("://")
    if protocol not in EXTRA_OF_PROTOCOL:
        known = ", ".join(f"{each}://" for each in EXTRA_OF_PROTOCOL)
        raise UsageError(f"store URL of protocol {protocol!r}; expected one of {known}")
    if any(mark in rest for mark in "?#@"):
        raise UsageError(
            f"{protocol}:// store URL with '?', '#' or '@'; expected bucket and prefix alone",
            remedy=f"settings and credentials go into {OPTIONS_VARIABLE} or the environment",
        )
    bucket, _, prefix = rest.partition("/")
    if not bucket:
        raise UsageError(f"store URL {url!r} names no bucket; expected {protocol}://BUCKET/PREFIX")
    if prefix:
        check_key(prefix)
    return protocol, rest
