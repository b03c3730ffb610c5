"""A small HTTP server for pages on this machine: bounded connections, strict headers, nothing logged.

`fedshift ui` and `fedshift serve` are built on it. It is no server for the open internet: it has no TLS of its own.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HOST = "127.0.0.1"
_ALWAYS = "; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


class LocalServer(ThreadingHTTPServer):
    """Each connection has a thread, and there are at most `max_connections`: those that do not finish asking within
    `ask_seconds` lose their place to others. An answer may take `answer_seconds`."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128
    max_connections = 64
    """When that many are open, the one that has been asking for the longest makes room for a new one."""
    ask_seconds = 10.0
    answer_seconds = 60.0

    def __init__(self, handler: type[BaseHTTPRequestHandler], port: int, host: str = HOST) -> None:
        super().__init__((host, port), handler)
        self.host = host
        self._connections = threading.Lock()
        self._asking: dict[socket.socket, float] = {}
        self._answering: set[socket.socket] = set()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def address(self) -> str:
        return f"http://{self.host}:{self.port}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Gives a connection its thread, if there is room or somebody has been asking for longer."""
        with self._connections:
            now = time.monotonic()
            late = [asking for asking, since in self._asking.items() if now - since > self.ask_seconds]
            if self._is_full() and not late:
                late = list(self._asking)[:1]
            for asking in late:
                del self._asking[asking]
                _hang_up(asking)
            if has_room := not self._is_full():
                self._asking[request] = now
        if has_room:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def has_asked(self, connection: socket.socket) -> None:
        """From now on the connection cannot lose its place."""
        with self._connections:
            if self._asking.pop(connection, None) is not None:
                self._answering.add(connection)

    def shutdown_request(self, request: Any) -> None:
        with self._connections:
            self._asking.pop(request, None)
            self._answering.discard(request)
        super().shutdown_request(request)

    def _is_full(self) -> bool:
        return len(self._asking) + len(self._answering) >= self.max_connections

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A closed browser is not an error."""


class LocalHandler(BaseHTTPRequestHandler):
    """One request. A subclass answers in `answer`, with `send` and `refuse`."""

    server: LocalServer
    server_version, sys_version = "fedshift", ""
    timeout = LocalServer.ask_seconds
    takes_posts = False

    def answer(self) -> None:
        raise NotImplementedError

    def do_GET(self) -> None:
        with suppress(ConnectionError, TimeoutError):
            self.server.has_asked(self.connection)
            self.connection.settimeout(self.server.answer_seconds)
            if not self._is_for_this_server():
                return self.refuse(HTTPStatus.FORBIDDEN, "This page is for this machine only.")
            self.answer()
        return None

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        if self.takes_posts:
            self.do_GET()
        else:
            self.send_error(HTTPStatus.NOT_IMPLEMENTED)

    def _is_for_this_server(self) -> bool:
        """Another site may point its host name at 127.0.0.1. That name is then in this header."""
        if self.server.host != HOST:
            return True
        return self.headers.get("Host", "") in (f"{HOST}:{self.server.port}", f"localhost:{self.server.port}")

    def send(
        self, text: str, kind: str, policy: str = "default-src 'none'", status: HTTPStatus = HTTPStatus.OK
    ) -> None:
        content = text.encode("utf-8", "replace")
        self.send_head(status, kind, policy, len(content))
        if self.command != "HEAD":
            self.wfile.write(content)

    def refuse(self, status: HTTPStatus, text: str) -> None:
        self.send(f"{text}\n", "text/plain", status=status)

    def send_head(
        self, status: HTTPStatus, kind: str, policy: str = "default-src 'none'", length: int | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.send_header("Content-Security-Policy", policy + _ALWAYS)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged to the terminal."""


def _hang_up(connection: socket.socket) -> None:
    """Its thread sees the end of the connection, and ends too."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
