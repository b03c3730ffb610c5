"""The live page's server: what it shows, what it sends twice (nothing), whom it refuses."""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from liveserver import serving
from runfiles import write_run

from fedshift.errors import InputError
from fedshift.report import live
from fedshift.report.live import LiveServer, Watcher, event, fingerprint, open_server

HOSTILE = "\"'><img src=x onerror=alert(1)>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


@pytest.fixture
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    monkeypatch.setattr(live, "LOOK_SECONDS", 0.05)
    with serving(folder) as server:
        yield server


def get(server: LiveServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, dict(answer.getheaders()), text


@contextmanager
def stream(server: LiveServer, path: str, last: str | None = None) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    connection.request("GET", path, headers={"Last-Event-ID": last} if last else {})
    answer = connection.getresponse()
    assert answer.status == 200 and answer.getheader("Content-Type", "").startswith("text/event-stream")
    assert answer.readline() == b"retry: 2000\n" and answer.readline() == b"\n"
    try:
        yield answer
    finally:
        connection.close()


def next_event(answer: http.client.HTTPResponse) -> tuple[str, str]:
    """Id and data of the next event."""
    number, data = "", []
    while line := answer.readline().decode().rstrip("\n"):
        field, _, value = line.partition(": ")
        number = value if field == "id" else number
        data += [value] if field == "data" else []
    return number, "\n".join(data)


def add_round(run: Path, number: int, value: float = 0.7) -> None:
    row = {"round": number, "phase": "test", "site": "photo", "name": "accuracy", "value": value}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def key_of(server: LiveServer, name: str) -> str:
    return next(run.key for run in server.pages.watcher.runs() if run.name == name)


def test_an_event_has_its_text_line_by_line() -> None:
    text = "a\nb\r\nc"
    assert event(text) == f"id: {fingerprint(text)}\nevent: part\ndata: a\ndata: b\ndata: c\n\n".encode()


def test_who_has_seen_it_gets_only_what_is_new(server: LiveServer, folder: Path) -> None:
    run = write_run(folder / "a", finished=False)
    path = f"/events/{key_of(server, 'a')}"
    with stream(server, path) as answer:
        first, text = next_event(answer)
        assert "round 3 of 20" in text and fingerprint(text) == first
    with stream(server, path, last=first) as answer:
        add_round(run, 4)
        second, text = next_event(answer)
        assert "round 4 of 20" in text and second != first
        # The curve is there once, with one point per round.
        [points] = {line for line in text.split('"') if line.startswith("0,") and line.count(" ") == 3}
        assert len(points.split()) == 4
    with stream(server, f"{path}?seen={second}") as answer:
        add_round(run, 5)
        assert "round 5 of 20" in next_event(answer)[1]


def test_who_has_seen_something_else_gets_it_all(server: LiveServer, folder: Path) -> None:
    write_run(folder / "a", finished=False)
    with stream(server, "/events", last="something old") as answer:
        number, text = next_event(answer)
        assert "round 3 of 20" in text and number == fingerprint(text)


def test_rounds_that_a_resumed_run_takes_back_are_gone(server: LiveServer, folder: Path) -> None:
    run = write_run(folder / "a", finished=False)
    kept = (run / "metrics.jsonl").read_text()
    add_round(run, 4)
    with stream(server, f"/events/{key_of(server, 'a')}") as answer:
        assert "round 4 of 20" in next_event(answer)[1]
        (run / "metrics.jsonl").write_text(kept)
        assert "round 3 of 20" in next_event(answer)[1]


@pytest.mark.parametrize("finished", [True, False])
def test_attacks_are_shown(server: LiveServer, folder: Path, finished: bool) -> None:
    write_run(folder / "a", finished=finished)
    write_run(folder / "b", finished=finished, config={"attack": ["poison:chalk:0.3", "noise:street"]})
    text = get(server, "/")[2]
    assert text.count("attack poison:chalk:0.3") == text.count("attack noise:street") == 1
    assert "attack poison:chalk:0.3" in get(server, f"/run/{key_of(server, 'b')}")[2]
    assert "attack " not in get(server, f"/run/{key_of(server, 'a')}")[2]


def test_the_pages_of_a_run(server: LiveServer, folder: Path) -> None:
    write_run(folder / "deep" / "down" / "a", "kd3a", notes={"weight": 0.5})
    key = key_of(server, "deep/down/a")
    status, headers, text = get(server, "/")
    assert status == 200 and f'href="/run/{key}"' in text and "1 finished" in text
    assert "script-src 'self'" in headers["Content-Security-Policy"] and headers["Cache-Control"] == "no-store"
    status, _, text = get(server, f"/run/{key}")
    assert status == 200 and "Weight of each site" in text and f'href="/report/{key}"' in text
    status, headers, text = get(server, f"/report/{key}")
    assert status == 200 and "What left each site" in text and "script" not in headers["Content-Security-Policy"]
    assert get(server, "/live.js")[1]["Content-Type"].startswith("text/javascript")
    assert get(server, "/live.css")[0] == 200
    status, headers, text = get(server, "/", method="HEAD")
    assert status == 200 and text == "" and int(headers["Content-Length"]) > 1000


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "localhost", ""])
def test_another_host_name_is_refused(server: LiveServer, folder: Path, host: str) -> None:
    write_run(folder / "secret-name")
    for path in ("/", "/events", f"/run/{key_of(server, 'secret-name')}"):
        status, headers, text = get(server, path, Host=host)
        assert status == 403 and "secret" not in text
        assert "Access-Control-Allow-Origin" not in headers
    assert get(server, "/", Host=f"localhost:{server.server_address[1]}")[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/../../etc/passwd",
            "/run/../../config.yaml",
            "/static/live.js",
            "/config.yaml",
            "/run/",
            "/x//",
            "/events/",
        ),
        *("/run/0123456789abcdef", "/report/%2e%2e", "/run/0123456789ABCDEF", "/live.js/", "/live%2ejs"),
    ],
)
def test_only_known_addresses_are_answered(server: LiveServer, folder: Path, path: str) -> None:
    write_run(folder / "a")
    assert get(server, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_it_is_read_only(server: LiveServer, method: str) -> None:
    assert get(server, "/", method=method)[0] == 501


def test_hostile_names_stay_names(server: LiveServer, folder: Path) -> None:
    write_run(
        folder / HOSTILE.replace("/", ""), HOSTILE, HOSTILE, sources=("<b>chalk", "x"), config={"dataset": HOSTILE}
    )
    [run] = server.pages.watcher.runs()
    for path in ("/", f"/run/{run.key}", f"/report/{run.key}"):
        text = get(server, path)[2]
        assert "onerror=alert(1)&gt;" in text and HOSTILE not in text and "<img" not in text and "<b>chalk" not in text


def test_streams_are_limited(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "streams", threading.BoundedSemaphore(1))
    with stream(server, "/events") as answer:
        next_event(answer)
        assert get(server, "/events")[0] == 503
    assert get(server, "/")[0] == 200


def test_damaged_runs_are_shown_as_such(server: LiveServer, folder: Path) -> None:
    run = write_run(folder / "a")
    (run / "results.json").write_text("{")
    key = key_of(server, "a")
    assert "1 damaged" in get(server, "/")[2]
    status, _, text = get(server, f"/run/{key}")
    assert status == 200 and "is damaged" in text
    assert get(server, f"/report/{key}")[0] == 404


def test_one_bad_run_does_not_hide_the_others(server: LiveServer, folder: Path) -> None:
    write_run(folder / "bad", finished=False, config={"seed": "x", "rounds": [1]})
    write_run(folder / "good")
    assert {run.name: run.status for run in server.pages.watcher.runs()} == {"bad": "damaged", "good": "finished"}
    status, _, text = get(server, "/")
    assert status == 200 and "1 damaged" in text and "1 finished" in text
    assert "seed is no count" in get(server, f"/run/{key_of(server, 'bad')}")[2]


def test_a_run_is_running_while_its_lock_is_held(folder: Path) -> None:
    if not Path("/proc/locks").exists():
        pytest.skip("this system does not tell which locks are held")
    run = write_run(folder / "a", finished=False)
    write_run(folder / "b", "source-only")
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        runs = Watcher(folder).runs()
        assert [(r.name, r.status) for r in runs] == [("a", "running"), ("b", "finished")]
        assert runs[0].share_done == 15.0 and runs[0].time_left == "26 s", "17 rounds of 1.5 s are left"
    [stopped] = [r for r in Watcher(folder).runs() if r.name == "a"]
    assert stopped.status == "stopped" and stopped.time_left == ""


def test_failed_and_stopped_runs_are_distinguished(server: LiveServer, folder: Path) -> None:
    write_run(folder / "a", finished=False)
    failed = write_run(folder / "b", "source-only", finished=False)
    (failed / "failed").write_text("site-failed\n")
    text = get(server, f"/run/{key_of(server, 'b')}")[2]
    assert "too few sites answered (site-failed)." in text and "It stopped" not in text
    assert "1 failed" in get(server, "/")[2]
    (failed / "failed").write_text("<b>/private/place</b>")
    [strange] = [run.record for run in Watcher(folder).runs() if run.status == "failed"]
    assert (
        strange is not None and strange.failure.startswith("An unexpected error") and "private" not in strange.failure
    )
    (failed / "failed").unlink()
    assert "failed" not in {run.status for run in Watcher(folder).runs()}


def test_only_runs_are_found_and_links_are_not_followed(folder: Path, tmp_path: Path) -> None:
    outside = write_run(tmp_path / "outside")
    (folder / "link").symlink_to(outside)
    run = write_run(folder / "a")
    write_run(run / "inside")
    (folder / "other").mkdir()
    (folder / "other" / "config.yaml").write_text("a: 1")
    assert [r.name for r in Watcher(folder).runs()] == ["a"]
    assert [r.name for r in Watcher(outside).runs()] == ["."]


def test_a_port_in_use_is_an_error_only_if_it_was_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=str(port)):
            open_server(folder, port)
        monkeypatch.setattr(live, "PORT", port)
        with open_server(folder) as server:
            assert server.server_address[0] == "127.0.0.1" and server.server_address[1] != port
    with pytest.raises(InputError, match="nowhere"):
        open_server(folder / "nowhere")


def test_ctrl_c_ends_it_cleanly(folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "fedshift", "ui", str(folder), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        # What a shell starts in the background ignores Ctrl-C, and so would everything these tests start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    port = int(line.split(":")[2].split("/")[0])
    # A page is open, as it mostly is.
    with socket.create_connection(("127.0.0.1", port)) as page:
        page.sendall(f"GET /events HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
        assert b"200" in page.recv(100)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=20)
    assert process.returncode == 0 and "ended" in out and errors == ""


def test_hundreds_of_connections_that_never_finish_asking_keep_nobody_out(server: LiveServer, folder: Path) -> None:
    """Some send nothing, some send a byte now and then; others are answered, with a bounded number of threads."""
    write_run(folder / "a", finished=False)
    before = threading.active_count()
    slow = []
    try:
        for number in range(200):
            connection = socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=10)
            if number % 2:
                connection.sendall(b"GET / HTTP/1.1\r\nHost:")
            slow.append(connection)
            if number % 40 == 39:
                status, _, text = get(server, "/")
                assert status == 200 and "round 3 of 20" in text
        for connection in slow[-10:]:
            connection.sendall(b" 1")
        assert all(get(server, "/")[0] == 200 for _ in range(5))
        assert threading.active_count() - before <= server.max_connections + 10
    finally:
        for connection in slow:
            connection.close()


def test_a_connection_that_never_finishes_asking_is_ended(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "ask_seconds", 0.2)
    with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=10) as drip:
        drip.sendall(b"GET / HT")
        threading.Event().wait(0.3)
        assert get(server, "/")[0] == 200  # Whoever comes next has it thrown out.
        assert drip.recv(10) == b""
