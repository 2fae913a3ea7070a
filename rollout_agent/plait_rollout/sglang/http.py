"""SGLang's HTTP control plane, as far as the agent needs it, with typed errors."""

import base64
import pickle
from typing import Any, Final, Literal

import httpx
import torch

from plait.errors import EngineRefused, EngineUnavailable

PauseMode = Literal["retract", "in_place"]

_CONNECT_SECONDS: Final = 10.0


class SglangApi:
    """One engine's control endpoints. Every call either succeeded or raises.

    Args:
        url: of the engine's server.
        timeout_seconds: for one call; an update call runs as long as its hook does.
    """

    def __init__(self, url: str, *, timeout_seconds: float = 600.0) -> None:
        self._client = httpx.Client(
            base_url=url, timeout=httpx.Timeout(timeout_seconds, connect=_CONNECT_SECONDS)
        )
        self._has_sessions: bool | None = None

    def close(self) -> None:
        self._client.close()

    def server_info(self) -> dict[str, Any]:
        """Start-up configuration: tp_size, pp_size, dp_size, nnodes…"""
        return self._call("GET", "/server_info")

    def weight_version(self) -> str:
        return str(self._call("GET", "/model_info")["weight_version"])

    def pause(self, mode: PauseMode) -> None:
        """Stops generation. `retract` takes running requests back into the queue and recomputes
        their KV afterwards; `in_place` leaves them as they are. A paused engine may be paused."""
        self._call("POST", "/pause_generation", {"mode": mode})

    def resume(self) -> None:
        self._call("POST", "/continue_generation", {})

    def set_weight_version(self, version: str) -> None:
        """Stamps what is generated from now on. Running requests get a new span."""
        body = {"new_version": version, "abort_all_requests": False}
        answer = self._call("POST", "/update_weight_version", body)
        if answer.get("new_version") != version:
            raise EngineRefused(f"the engine was told version {version!r} and says {answer}")

    def update_from_tensor(
        self, load_format: str, request: bytes, *, ranks: int, flush_cache: bool
    ) -> None:
        """Calls a custom loader in every rank with one uint8 tensor, within an update session."""
        tensor = torch.frombuffer(bytearray(request), dtype=torch.uint8)
        # Plain pickle: self-contained, so that every rank may take the same one.
        payload = base64.b64encode(pickle.dumps([("request", tensor)])).decode()
        body = {
            "serialized_named_tensors": [payload] * ranks,
            "load_format": load_format,
            "selector": "target",
            "flush_cache": flush_cache,
        }
        self._begin_session()
        try:
            self._call("POST", "/update_weights_from_tensor", body)
        finally:
            self._end_session()

    def update_from_disk(self, model_path: str) -> None:
        body = {"model_path": model_path, "flush_cache": True}
        self._call("POST", "/update_weights_from_disk", body)

    def _begin_session(self) -> None:
        """Opens an update session, which 0.5.23 requires and older releases lack.

        For the *draft* model's runners, of which there usually are none: a session of the target's
        would undo and redo SGLang's post-load transforms around an update that wants neither.
        """
        if self._has_sessions is False:
            return
        answer = self._send("POST", "/begin_weight_update", {"selector": "draft"})
        self._has_sessions = answer.status_code not in (404, 405)
        if not self._has_sessions:
            return
        if answer.status_code == httpx.codes.BAD_REQUEST and "already open" in answer.text:
            # An agent died within its session: nobody else will close it.
            self._call("POST", "/end_weight_update", {})
            answer = self._send("POST", "/begin_weight_update", {"selector": "draft"})
        _checked(answer)

    def _end_session(self) -> None:
        if self._has_sessions:
            self._call("POST", "/end_weight_update", {})

    def _call(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        answer = _checked(self._send(method, path, body))
        if "json" not in answer.headers.get("content-type", ""):
            return {}
        found = answer.json()
        return found if isinstance(found, dict) else {}

    def _send(self, method: str, path: str, body: object = None) -> httpx.Response:
        try:
            return self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise EngineUnavailable(
                f"{method} {self._client.base_url}{path.lstrip('/')}: "
                f"{type(error).__name__}: {error}"
            ) from error


def _checked(answer: httpx.Response) -> httpx.Response:
    what = f"{answer.request.method} {answer.request.url}: {answer.status_code} {answer.text[:500]}"
    if answer.is_server_error:
        raise EngineUnavailable(what)
    if not answer.is_success:
        raise EngineRefused(what)
    return answer
