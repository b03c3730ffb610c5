"""A read-only page on this machine that shows runs while they go on: `fedshift ui`.

The server draws, with the charts of the report; the browser only puts in place what arrives. Every event carries the
whole part of the page that changed, and its id is the hash of it: whoever reconnects and has seen it gets nothing.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fedshift._version import __version__
from fedshift.errors import InputError
from fedshift.report.charts import PERCENT, sparkline
from fedshift.report.details import describe
from fedshift.report.gallery import Gallery, gallery_of
from fedshift.report.page import render, templates
from fedshift.report.watching import Watched, Watcher

HOST = "127.0.0.1"
PORT = 8642
"""Tried first where no port is asked for; a free one is taken where it is in use."""
LOOK_SECONDS = 1.0
_ALIVE_SECONDS = 15.0
_MAX_STREAMS = 24

_ADDRESS = re.compile(r"/(?:(run|events|report)/([0-9a-f]{16})|(events|live\.js|live\.css)?)")
_PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; img-src data:"
)
_REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_ALWAYS = "; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


class Pages:
    """What is shown, as text."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher
        self._templates = templates()

    def shell(self, title: str, events: str, part: str) -> str:
        return self._templates.get_template("live.html").render(
            title=title,
            events=events,
            part=part,
            seen=fingerprint(part),
            root=str(self.watcher.root),
            version=__version__,
        )

    def overview(self) -> str:
        runs = self.watcher.runs()
        drawn = [(run, sparkline(run.curve, PERCENT)) for run in runs]
        return self._templates.get_template("live_list.html").render(runs=drawn)

    def run(self, run: Watched) -> str:
        detail = describe(1, run.record, Gallery()) if run.record else None
        return self._templates.get_template("live_run.html").render(run=run, detail=detail)

    def report(self, run: Watched) -> str:
        assert run.record is not None
        return render([run.record], [gallery_of(run.record, make=False)])


def fingerprint(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:20]


def event(text: str) -> bytes:
    """A server-sent event with the text as it is: every line of it is a line of data."""
    lines = "".join(f"data: {line}\n" for line in re.split(r"\r\n|\r|\n", text))
    return f"id: {fingerprint(text)}\nevent: part\n{lines}\n".encode("utf-8", "replace")


class LiveServer(ThreadingHTTPServer):
    """Listens on this machine only. `stopping` ends all streams."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, root: Path, port: int) -> None:
        super().__init__((HOST, port), _Handler)
        self.pages = Pages(Watcher(root))
        self.stopping = threading.Event()
        self.streams = threading.BoundedSemaphore(_MAX_STREAMS)

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away is no error."""


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    server_version, sys_version = "fedshift", ""

    def do_GET(self) -> None:
        with suppress(ConnectionError):
            self._answer()

    def do_HEAD(self) -> None:
        self.do_GET()

    def _answer(self) -> None:
        port = self.server.server_address[1]
        # A page elsewhere may point its own name at 127.0.0.1; its name is then in this header.
        if self.headers.get("Host", "") not in (f"{HOST}:{port}", f"localhost:{port}"):
            return self._refuse(HTTPStatus.FORBIDDEN, "This page is only for this machine.")
        url = urlsplit(self.path)
        match = _ADDRESS.fullmatch(url.path)
        if match is None:
            return self._refuse(HTTPStatus.NOT_FOUND, "There is nothing here.")
        kind, key, plain = match.groups()
        pages = self.server.pages
        if kind is None:
            return self._plain(plain or "", url.query)
        run = pages.watcher.find(key)
        if run is None or (kind == "report" and run.record is None):
            return self._refuse(HTTPStatus.NOT_FOUND, "There is no such run (any more).")
        if kind == "events":
            return self._stream(lambda: self._part_of(key), url.query)
        if kind == "report":
            return self._send(pages.report(run), "text/html", _REPORT_POLICY)
        return self._send(pages.shell(run.name, f"/events/{key}", pages.run(run)), "text/html", _PAGE_POLICY)

    def _plain(self, name: str, query: str) -> None:
        pages = self.server.pages
        if name == "events":
            return self._stream(pages.overview, query)
        if name == "live.js":
            return self._send(_static("static/live.js"), "text/javascript")
        if name == "live.css":
            return self._send(_static("templates/style.css") + _static("static/live.css"), "text/css")
        return self._send(pages.shell("Runs", "/events", pages.overview()), "text/html", _PAGE_POLICY)

    def _part_of(self, key: str) -> str:
        run = self.server.pages.watcher.find(key)
        return self.server.pages.run(run) if run else "<p class='notice'>This run is not there any more.</p>"

    def _stream(self, draw: Callable[[], str], query: str) -> None:
        """Sends what `draw` gives whenever it changes, beginning with what the browser has not seen."""
        if not self.server.streams.acquire(blocking=False):
            return self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "Too many pages are open: close some.")
        try:
            self._head(HTTPStatus.OK, "text/event-stream")
            if self.command == "HEAD":
                return None
            seen = self.headers.get("Last-Event-ID") or parse_qs(query).get("seen", [""])[0]
            self.wfile.write(b"retry: 2000\n\n")
            silent = 0.0
            while not self.server.stopping.is_set():
                part = draw()
                if fingerprint(part) != seen:
                    seen, silent = fingerprint(part), 0.0
                    self.wfile.write(event(part))
                elif silent >= _ALIVE_SECONDS:
                    silent = 0.0
                    self.wfile.write(b": nothing new\n\n")
                self.wfile.flush()
                self.server.stopping.wait(LOOK_SECONDS)
                silent += LOOK_SECONDS
        finally:
            self.server.streams.release()
        return None

    def _send(self, text: str, kind: str, policy: str = "default-src 'none'") -> None:
        content = text.encode("utf-8", "replace")
        self._head(HTTPStatus.OK, kind, policy, len(content))
        if self.command != "HEAD":
            self.wfile.write(content)

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        content = f"{text}\n".encode()
        self._head(status, "text/plain", length=len(content))
        if self.command != "HEAD":
            self.wfile.write(content)

    def _head(
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
        """Nothing: the terminal is for what the user asked."""


def _static(name: str) -> str:
    return (files("fedshift.report") / name).read_text(encoding="utf-8")


def open_server(root: Path, port: int | None = None) -> LiveServer:
    """A server for the runs below `root`, ready to serve. Without a port the usual one, or any that is free."""
    if not root.is_dir():
        raise InputError("data-missing", f"there is no folder {root}: give the one that your runs are in")
    for candidate in (PORT, 0) if port is None else (port,):
        with suppress(OSError, OverflowError):
            return LiveServer(root, candidate)
    raise InputError("config-value", f"port {port} is in use or not allowed: choose another --port, or leave it out")
