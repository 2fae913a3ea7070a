"""A TCP proxy that loses what it is told to lose: requests on their way, or answers to them."""

import socket
import threading
from typing import Literal

Fault = Literal["cut", "mute"]


class Proxy:
    """Passes bytes between clients and one server.

    A fault applies to requests whose head begins with some text: `cut` breaks the connection in
    the middle of the request, `mute` lets the server answer and breaks it then.

    Attributes:
        applied: the text of every fault that was applied, in order.
    """

    def __init__(self, port: int) -> None:
        self._upstream = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.2)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._faults: list[tuple[str, Fault, int]] = []
        self._lock = threading.Lock()
        self.applied: list[str] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def lose(self, head: str, fault: Fault, times: int = 1) -> None:
        """Apply a fault to the next so many requests whose head begins with `head`."""
        with self._lock:
            self._faults.append((head, fault, times))

    def heal(self) -> None:
        with self._lock:
            self._faults.clear()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            threading.Thread(target=self._pass, args=(connection,), daemon=True).start()

    def _pass(self, client: socket.socket) -> None:
        """Requests and answers of one connection, strictly by turns as HTTP/1.1 clients do."""
        with client, socket.create_connection(self._upstream) as server:
            _Exchange(self, client, server).run()

    def fault_for(self, data: bytes) -> Fault | None:
        with self._lock:
            for number, (head, fault, times) in enumerate(self._faults):
                if data.startswith(head.encode()) and times > 0:
                    self._faults[number] = (head, fault, times - 1)
                    self.applied.append(head)
                    return fault
        return None


class _Exchange:
    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy, self._client, self._server = proxy, client, server
        self._muted = threading.Event()
        self._answered = threading.Event()
        self._answered.set()

    def run(self) -> None:
        answers = threading.Thread(target=self._answers, daemon=True)
        answers.start()
        try:
            while data := self._client.recv(1 << 16):
                if self._answered.is_set():  # the first bytes of a request
                    self._answered.clear()
                    fault = self._proxy.fault_for(data)
                    if fault == "cut":
                        self._server.sendall(data[: len(data) // 2])
                        break
                    if fault == "mute":
                        self._muted.set()
                self._server.sendall(data)
        except OSError:
            pass  # one side is gone: so is the other, below
        self._break()
        answers.join()

    def _answers(self) -> None:
        try:
            while data := self._server.recv(1 << 16):
                self._answered.set()
                if self._muted.is_set():
                    break
                self._client.sendall(data)
        except OSError:
            pass  # as above
        self._break()

    def _break(self) -> None:
        for side in (self._client, self._server):
            try:
                side.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
