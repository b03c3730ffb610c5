"""A served model answers what `predict` answers, and nothing to those who should not ask."""

from __future__ import annotations

import base64
import io
import json
import socket
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tinydata import shapes

import fedshift
from fedshift.errors import InputError
from fedshift.handover import serve
from fedshift.handover.serve import ModelServer, open_model_server

TOKEN = "a-token-of-the-tests"


@contextmanager
def serving(run: Path, **keys: Any) -> Iterator[ModelServer]:
    with open_model_server(run, port=0, **keys) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(10)


@pytest.fixture(scope="module")
def run(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> fedshift.Run:
    out = tmp_path_factory.mktemp("serve") / "run"
    return fedshift.fit("fedavg", data=tiny_data, target="dim", out=out, rounds=1, batch_size=16, workers=0)


@pytest.fixture
def server(run: fedshift.Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelServer]:
    monkeypatch.setenv(serve.TOKEN, TOKEN)
    with serving(run.path) as server:
        yield server


def picture(number: int = 0, format: str = "PNG", side: int = 16) -> bytes:
    buffer = io.BytesIO()
    image = Image.fromarray(shapes(number + 1, (0.6, 0.8, 0.7), 0.1, 7)[0][number])
    image.resize((side, side), Image.Resampling.NEAREST).save(buffer, format=format)
    return buffer.getvalue()


def ask(
    server: ModelServer, method: str, path: str, body: bytes | None = None, token: str | None = TOKEN, **headers: str
) -> tuple[int, dict[str, str], Any]:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=20)
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body, given | ({"Authorization": f"Bearer {token}"} if token else {}))
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    is_json = answer.headers["Content-Type"].startswith("application/json")
    return answer.status, dict(answer.headers), json.loads(data) if is_json else data.decode()


def test_it_answers_what_predict_answers(server: ModelServer, run: fedshift.Run) -> None:
    status, _, model = ask(server, "GET", "/model")
    assert status == 200 and model["classes"] == run.results["classes"] and model["max_bytes"] == 20 * 2**20
    for number, format in enumerate(("PNG", "BMP", "TIFF", "GIF")):
        data = picture(number, format)
        status, _, found = ask(server, "POST", "/predict", data)
        with Image.open(io.BytesIO(data)) as image:
            wanted = run.predict_proba(np.array(image.convert("RGB"))[None])[0]
        assert status == 200 and list(found["probabilities"].values()) == pytest.approx(wanted, abs=1e-5)
        assert found["prediction"] == model["classes"][int(wanted.argmax())]


def test_only_those_with_the_token_are_answered(server: ModelServer) -> None:
    for token in (None, "wrong", TOKEN + "x", "", "ä"):
        for method, path in (("GET", "/model"), ("POST", "/predict")):
            status, _, found = ask(server, method, path, picture() if method == "POST" else None, token)
            assert status == 401 and "token" in found["error"].lower()
    status, headers, page = ask(server, "GET", "/", token=None)
    assert status == 200 and "Drop a picture here" in page and "script-src 'self'" in headers["Content-Security-Policy"]
    assert TOKEN not in page
    # A page elsewhere whose name was pointed at this machine, and one that asks the browser for permission.
    assert ask(server, "GET", "/model", Host="evil.example")[0] == 403
    assert ask(server, "OPTIONS", "/predict", token=None)[0] == 501


def bomb() -> bytes:
    """A PNG of a few bytes that says it has a hundred megapixels."""
    parts = [(b"IHDR", struct.pack(">IIBBBBB", 10_000, 10_000, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(b""))]
    data = b"\x89PNG\r\n\x1a\n"
    for name, content in parts:
        data += struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
    return data


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"this is no picture", 422, "cannot be read"),
        (picture()[:60], 422, "cannot be read"),
        (bomb(), 422, "megapixels"),
        (b"%PDF-1.4 a document", 422, "cannot be read"),
        (b"", 400, "not whole"),
    ],
)
def test_what_is_no_picture_gets_a_sentence(server: ModelServer, body: bytes, status: int, words: str) -> None:
    found = ask(server, "POST", "/predict", body)
    assert found[0] == status and words in found[2]["error"] and "Traceback" not in found[2]["error"]


def test_bodies_are_limited_before_they_are_read(run: fedshift.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(serve.TOKEN, TOKEN)
    with serving(run.path, max_megabytes=1) as server:
        assert ask(server, "POST", "/predict", bytes(2**20 + 1))[0] == 413
        assert ask(server, "POST", "/predict", bytes(3 * 2**20))[0] == 413
        for length in ("-1", "99999999999999999", "1e3", "²"):
            with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
                head = f"POST /predict HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nAuthorization: Bearer {TOKEN}\r\n"
                raw.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode())
                assert raw.recv(12) in (b"HTTP/1.0 411", b"HTTP/1.0 413")


def test_a_fault_inside_tells_the_client_nothing(
    server: ModelServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(data: bytes) -> dict[str, Any]:
        raise ValueError("/secret/path")

    monkeypatch.setattr(server.model, "answer_picture", broken)
    status, _, found = ask(server, "POST", "/predict", picture())
    assert (status, found) == (500, {"error": "This could not be worked out."})
    assert "/secret" not in capfd.readouterr().err


def test_too_many_at_once_are_told_to_wait(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_WAIT_SECONDS", 0.05)
    monkeypatch.setattr(server, "working", threading.BoundedSemaphore(1))
    with server.working:
        assert ask(server, "POST", "/predict", picture())[0] == 503
    assert ask(server, "POST", "/predict", picture())[0] == 200


def test_a_weak_token_is_refused(run: fedshift.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(serve.TOKEN, "short")
    with pytest.raises(InputError, match="at least 16"):
        open_model_server(run.path, port=0)


def test_rows_of_a_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(serve.TOKEN, TOKEN)
    rng = np.random.default_rng(0)
    sites = {}
    for name in ("north", "south", "west"):
        x = rng.normal(size=(40, 3)).astype(np.float32)
        sites[name] = (x, (x[:, 0] > 0).astype(np.int64))
    run = fedshift.fit("fedavg", data=sites, target="west", out=tmp_path / "run", rounds=1, workers=0)
    with serving(run.path) as server:
        rows = [[0.5, None, -1], [1, 2, 3.5]]
        as_json = {"Content_Type": "application/json"}
        status, _, found = ask(server, "POST", "/predict", json.dumps({"rows": rows}).encode(), **as_json)
        wanted = run.predict_proba(np.array(rows, np.float32))
        assert status == 200
        assert [list(row["probabilities"].values()) for row in found["rows"]] == pytest.approx(wanted, abs=1e-5)
        for bad in (
            [[1, 2]],
            [["1", 2, 3]],
            [[True, 2, 3]],
            [],
            "x",
            [[1e60, 2, 3]],
            [[10**400, 0, 0]],
            None,
            [1, 2, 3],
        ):
            assert ask(server, "POST", "/predict", json.dumps({"rows": bad}).encode(), **as_json)[0] == 422, bad
        assert ask(server, "POST", "/predict", b"[" * 4_000, **as_json)[0] == 400
        # Ten megabytes of empty lists would take 200 MB.
        status, _, found = ask(server, "POST", "/predict", b"[" + b"[]," * 3_300_000 + b"[]]", **as_json)
        assert status == 422 and "more values" in found["error"]
        assert ask(server, "POST", "/predict", picture())[0] == 415


@pytest.mark.slow
def test_a_mask_has_the_size_of_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(serve.TOKEN, TOKEN)
    x = shapes(24, (0.6, 0.8, 0.7), 0.1, 7)[0].repeat(2, axis=1).repeat(2, axis=2)
    sites = {name: (x, (x[..., 0] > 90).astype(np.uint8)) for name in ("north", "south", "west")}
    run = fedshift.fit("fedavg", data=sites, target="west", out=tmp_path / "run", rounds=1, workers=0)
    with serving(run.path) as server:
        status, _, found = ask(server, "POST", "/predict", picture(side=90))
        assert status == 200 and sum(found["shares"].values()) == pytest.approx(1, abs=1e-4)
        with Image.open(io.BytesIO(base64.b64decode(found["mask"]))) as mask:
            assert mask.size == (90, 90) and int(np.asarray(mask).max()) < len(run.results["classes"])
