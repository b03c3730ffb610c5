"""`fedshift serve`: a model behind a small HTTP interface, and a page to drop a picture on.

Whoever can send a request is not trusted: a token is asked for, sizes are limited before anything is read or decoded, a
few requests are worked on at a time, and an answer never tells what went wrong inside.
"""

from __future__ import annotations

import base64
import colorsys
import hmac
import io
import json
import os
import secrets
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from fedshift._version import __version__
from fedshift.data.decoding import READABLE, UnreadableError, image_size
from fedshift.errors import InputError
from fedshift.localserver import HOST, LocalHandler, LocalServer
from fedshift.runs.api import Run, Select, as_inputs
from fedshift.runs.files.model import probabilities, with_far
from fedshift.runs.predict import UNLIKE, decoded_for, likeliest, tiled_classes, whose_model

PORT = 8643
"""The port that is tried first if none is asked for. If it is in use, a free one is taken."""
TOKEN = "FEDSHIFT_TOKEN"
"""The environment variable with a token of the user's own; otherwise a new one is drawn at every start."""
MAX_MEGABYTES = 20
MAX_PIXELS = 40_000_000
MAX_ROWS = 1000
AT_ONCE = 2
"""Requests that are worked on at the same time; others wait for `_WAIT_SECONDS`, then are told to come back."""
_WAIT_SECONDS = 10.0
_SHORTEST_TOKEN = 16
_STATIC = {
    "/": ("serve.html", "text/html"),
    "/serve.js": ("serve.js", "text/javascript"),
    "/serve.css": ("serve.css", "text/css"),
}
_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src blob: data:"


class RefusedError(Exception):
    """A request that cannot be answered, with the words that the client gets."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


class ServedModel:
    """A model ready to answer: bytes or rows in, plain values out."""

    def __init__(self, run: Path, site: str | None = None, select: Select = "last") -> None:
        finished = Run(run)
        self.saved = finished.model(select)
        chosen = finished.choose(self.saved, site)
        self.net = self.saved.network(chosen)
        self._forward = threading.Lock()  # What a pass tells of distances is kept in the network for its time.
        self.header = self.saved.header
        self.whose = whose_model(finished, self.saved, site, chosen)
        self.warnings = [found["text"] for found in finished.warnings]
        self.name = f"{finished.results['method']} on {finished.results['dataset']}"

    def describe(self) -> dict[str, Any]:
        """What a client needs to know, for the page and for programs."""
        header = self.header
        about: dict[str, Any] = {
            "name": self.name,
            "task": header.task,
            "classes": list(header.classes),
            "model": self.whose,
            "calibrated": header.temperature != 1.0,
            "warnings": self.warnings,
            "served_by": f"fedshift {__version__}",
        }
        if len(header.input_shape) == 1:
            return about | {"columns": list(header.columns), "max_rows": MAX_ROWS}
        about |= {"formats": READABLE, "max_pixels": MAX_PIXELS}
        if header.task == "segmentation":
            about["colours"] = [f"#{colour.tobytes().hex()}" for colour in _colours(len(header.classes))]
        return about

    def answer_picture(self, data: bytes) -> dict[str, Any]:
        """The classes of a picture file, or a mask of it as PNG in base64."""
        header = self.header
        if len(header.input_shape) == 1:
            raise RefusedError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, 'This model takes rows: {"rows": [[...]]} as JSON.')
        try:
            size = image_size(data)
            if size[0] * size[1] > MAX_PIXELS:
                raise UnreadableError(f"it is {size[1]} x {size[0]}, more than {MAX_PIXELS // 10**6} megapixels")
            image = decoded_for(header, data)
        except UnreadableError as error:
            raise RefusedError(HTTPStatus.UNPROCESSABLE_ENTITY, f"This picture cannot be read: {error}.") from error
        if header.tiled:
            numbers = tiled_classes(self.net, header, image, size)
        else:
            inputs = as_inputs(np.array(image)[None], header.input_shape)
            if header.task == "classification":
                return self._classified(inputs)[0]
            numbers = likeliest(probabilities(self.net, inputs)[0], size)
        covered = np.bincount(numbers.ravel(), minlength=len(header.classes)) / numbers.size
        return {
            "shares": dict(zip(header.classes, np.round(covered, 6).tolist(), strict=True)),
            "mask": _png(Image.fromarray(self.saved.to_ids(numbers))),
            "picture": _png(Image.fromarray(_colours(len(header.classes))[numbers])),
        }

    def answer_rows(self, rows: Any) -> dict[str, Any]:
        """The classes of table rows: lists of numbers, null for a missing value."""
        if len(self.header.input_shape) != 1:
            raise RefusedError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "This model takes a picture file as the body.")
        columns = self.header.input_shape[0]
        wanted = f"Send at most {MAX_ROWS} rows of {columns} numbers or null each."
        if not isinstance(rows, list) or not 0 < len(rows) <= MAX_ROWS:
            raise RefusedError(HTTPStatus.UNPROCESSABLE_ENTITY, wanted)
        for row in rows:
            is_row = isinstance(row, list) and len(row) == columns
            if not is_row or not all(value is None or type(value) in (int, float) for value in row):
                raise RefusedError(HTTPStatus.UNPROCESSABLE_ENTITY, wanted)
        try:
            with np.errstate(over="ignore"):
                table = np.array(rows, dtype=np.float32)
        except OverflowError as error:
            raise RefusedError(HTTPStatus.UNPROCESSABLE_ENTITY, wanted) from error
        if np.isinf(table).any():
            raise RefusedError(HTTPStatus.UNPROCESSABLE_ENTITY, "A value is infinite, or beyond 32-bit floats.")
        return {"rows": self._classified(torch.from_numpy(table))}

    def _classified(self, inputs: torch.Tensor) -> list[dict[str, Any]]:
        classes = self.header.classes
        with self._forward:
            found, is_far = with_far(self.net, self.header, inputs)
        answers = []
        for shares, far in zip(found.tolist(), is_far.tolist(), strict=True):
            best = max(range(len(classes)), key=shares.__getitem__)
            answers.append(
                {
                    "prediction": classes[best],
                    "confidence": round(shares[best], 6),
                    "probabilities": {name: round(share, 6) for name, share in zip(classes, shares, strict=True)},
                    "note": UNLIKE if far else "",
                }
            )
        return answers


def _colours(count: int) -> Any:
    """A colour for each class, `(classes, 3)` uint8, far apart in hue."""
    found = [colorsys.hls_to_rgb((0.61 + 0.382 * k) % 1, 0.42 + 0.16 * (k % 3), 0.62) for k in range(count)]
    return (255 * np.array(found)).round().astype(np.uint8)


def _png(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode()


class ModelServer(LocalServer):
    """`GET /model` tells what there is, `POST /predict` answers. Both ask for the token; the page itself does not."""

    max_connections = 16

    def __init__(self, model: ServedModel, token: str, port: int, host: str, max_megabytes: int) -> None:
        super().__init__(_Handler, port, host)
        self.model, self.token = model, token
        self.max_bytes = max_megabytes * 2**20
        self.working = threading.BoundedSemaphore(AT_ONCE)

    @property
    def page(self) -> str:
        """The address with the token behind `#`: browsers keep that part to themselves."""
        return f"{self.address}#token={self.token}"


def open_model_server(
    run: Path,
    *,
    site: str | None = None,
    select: Select = "last",
    port: int | None = None,
    host: str = HOST,
    max_megabytes: int = MAX_MEGABYTES,
) -> ModelServer:
    """A server for a finished run's model, ready to serve. Without a port, 8643 or any free one."""
    token = os.environ.get(TOKEN) or secrets.token_urlsafe(24)
    if len(token) < _SHORTEST_TOKEN or not (token.isascii() and token.isprintable() and " " not in token):
        raise InputError("config-value", f"{TOKEN}: use at least {_SHORTEST_TOKEN} printable characters without spaces")
    model = ServedModel(run, site, select)
    for candidate in (PORT, 0) if port is None else (port,):
        with suppress(OSError, OverflowError):
            return ModelServer(model, token, candidate, host, max_megabytes)
    raise InputError("config-value", f"cannot listen on {host}:{port or PORT}: choose another --port, or leave it out")


class _Handler(LocalHandler):
    server: ModelServer
    takes_posts = True

    def answer(self) -> None:
        path = self.path.partition("?")[0]
        if path in _STATIC and self.command in ("GET", "HEAD"):
            name, kind = _STATIC[path]
            return self.send((files("fedshift.handover") / "static" / name).read_text("utf-8"), kind, _POLICY)
        routes: dict[tuple[str, str], Callable[[], dict[str, Any]]] = {
            ("GET", "/model"): lambda: self.server.model.describe() | {"max_bytes": self.server.max_bytes},
            ("POST", "/predict"): self._predicted,
        }
        route = routes.get((self.command, path))
        try:
            if route is None:
                raise RefusedError(HTTPStatus.NOT_FOUND, "There is nothing here.")
            self._require_token()
            found = route()
        except RefusedError as refused:
            self._discard_body()
            return self._json({"error": refused.text}, refused.status)
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:  # Whatever it was, the client gets no word of it.
            print(f"a request failed: {type(error).__name__}", file=sys.stderr)
            return self._json({"error": "This could not be worked out."}, HTTPStatus.INTERNAL_SERVER_ERROR)
        return self._json(found)

    def _require_token(self) -> None:
        kind, _, given = self.headers.get("Authorization", "").partition(" ")
        right = hmac.compare_digest(given.strip().encode(), self.server.token.encode())
        if kind != "Bearer" or not right:
            raise RefusedError(HTTPStatus.UNAUTHORIZED, "A token is needed: the header Authorization: Bearer TOKEN.")

    def _predicted(self) -> dict[str, Any]:
        body = self._body()
        if not self.server.working.acquire(timeout=_WAIT_SECONDS):
            raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "Too many requests at once: try again.")
        try:
            if self.headers.get("Content-Type", "").partition(";")[0].strip().lower() != "application/json":
                return self.server.model.answer_picture(body)
            # Parsed, small values take many times their bytes: counted first.
            if body.count(b",") + body.count(b"[") > MAX_ROWS * (self.server.model.header.input_shape[0] + 2):
                raise RefusedError(HTTPStatus.UNPROCESSABLE_ENTITY, f"Those are more values than {MAX_ROWS} rows have.")
            try:
                content = json.loads(body)
            except (ValueError, RecursionError) as error:
                raise RefusedError(HTTPStatus.BAD_REQUEST, "The body is no JSON.") from error
            return self.server.model.answer_rows(content.get("rows") if isinstance(content, dict) else None)
        finally:
            self.server.working.release()

    def _length(self) -> int:
        text = self.headers.get("Content-Length", "")
        return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else -1

    def _body(self) -> bytes:
        length, limit = self._length(), self.server.max_bytes
        if length < 0:
            raise RefusedError(HTTPStatus.LENGTH_REQUIRED, "Say how long the body is (Content-Length).")
        if length > limit:
            raise RefusedError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"That is more than {limit // 2**20} MB, which is the limit here."
            )
        self._is_read = True
        body = self.rfile.read(length)
        if len(body) < length or not body:
            raise RefusedError(HTTPStatus.BAD_REQUEST, "The body is not whole.")
        return body

    def _discard_body(self) -> None:
        """Reads what was still to come, within limits: a client that is cut off while it sends sees no answer."""
        left = 0 if getattr(self, "_is_read", False) else min(self._length(), 4 * self.server.max_bytes)
        while left > 0 and (part := self.rfile.read(min(left, 2**16))):
            left -= len(part)

    def _json(self, content: dict[str, Any], status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send(json.dumps(content), "application/json", status=status)
