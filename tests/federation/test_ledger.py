"""A site's ledger as evidence: it lists all that crossed, and shows when it was changed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fedshift.audit.ledger import audit_ledger
from fedshift.cli.app import app
from fedshift.errors import InputError
from fedshift.federation import codec
from fedshift.federation.engines import Engine, Failure
from fedshift.federation.ledger import HEAD, LEDGER, ORIGIN, Head, Ledger, fields_left
from fedshift.federation.releases import kinds
from fedshift.federation.step import STEPS, Request
from fedshift.methods.averaging import Trained
from fedshift.runs import planning
from fedshift.runs.config import make_config
from fedshift.runs.execute import run

KEYS: dict[str, Any] = {"target": "dim", "arch": "digits-copa", "batch_size": 8, "rounds": 2, "workers": 0}


def filled(folder: Path, questions: int = 3) -> Path:
    """A ledger of 5 lines a question: asked, three fields, answered."""
    for number in range(questions):
        ledger = Ledger(folder)  # Each time anew, as after a restart.
        ledger.asked("averaging.train", number, "a", b"body")
        ledger.answered(
            "averaging.train", number, fields_left(Trained({}, 12, 0.5), {}), None, "00000000.100", 0, b"reply"
        )
    return folder / LEDGER


def test_a_ledger_goes_on_over_restarts_and_is_summed_up(tmp_path: Path) -> None:
    path = filled(tmp_path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["event"] for row in rows[:5]] == ["asked", "left", "left", "left", "answered"]
    assert all(row["time"].startswith("20") and len(row["prev"]) == 64 for row in rows)
    found = audit_ledger(path)
    assert (found.lines, found.questions, found.answers) == (15, {"averaging.train": 3}, 3)
    assert found.kinds["count"].releases == found.kinds["count"].values == 3
    assert found.kinds["count"].bytes == 24 and found.kinds["count"].rounds == {0, 1, 2}
    assert json.loads((tmp_path / HEAD).read_text()) == {
        "lines": 15,
        "bytes": path.stat().st_size,
        "sha256": found.head,
        "questions": 3,
        "starts": 0,
    }


def test_a_site_that_was_killed_before_it_wrote_the_head_goes_on(tmp_path: Path) -> None:
    path = filled(tmp_path, 1)
    head = (tmp_path / HEAD).read_bytes()
    Ledger(tmp_path).asked("averaging.train", 1, "a", b"")
    (tmp_path / HEAD).write_bytes(head)
    assert audit_ledger(path).behind == 1
    assert Ledger(tmp_path).asked("averaging.train", 2, "a", b"").questions == 3
    assert audit_ledger(path).behind == 0


CHANGES = ("change", "remove", "insert", "swap")


@settings(max_examples=60, deadline=None)
@given(line=st.integers(0, 14), how=st.sampled_from(CHANGES), data=st.data())
def test_a_line_that_is_changed_later_breaks_the_chain(
    line: int, how: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("ledger")
    path = filled(folder)
    lines = path.read_text().splitlines()
    if how == "change":
        at = data.draw(st.integers(0, len(lines[line]) - 1))
        lines[line] = lines[line][:at] + chr((ord(lines[line][at]) + 1) % 128 or 1) + lines[line][at + 1 :]
    elif how == "remove":
        del lines[line]
    elif how == "insert":
        lines.insert(line, lines[line])
    else:
        lines[line], lines[line - 1] = lines[line - 1], lines[line]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(InputError, match=r"ledger\.jsonl, line \d+") as caught:
        audit_ledger(path)
    assert caught.value.code == "ledger-broken"
    shutil.rmtree(folder)


@pytest.mark.parametrize("kept", range(15))
def test_lines_that_are_cut_off_at_the_end_are_missed(kept: int, tmp_path: Path) -> None:
    path = filled(tmp_path)
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines()[:kept]))
    with pytest.raises(InputError, match=rf"line {kept + 1}: it is missing, with all up to line 15"):
        audit_ledger(path)
    Ledger(tmp_path).asked("averaging.train", 9, "a", b"")
    with pytest.raises(InputError, match=rf"line {kept + 1}: it does not follow"):
        audit_ledger(path)


def test_the_number_of_the_line_is_told_and_the_exit_code_is_2(tmp_path: Path) -> None:
    path = filled(tmp_path / "sites" / "amber")
    filled(tmp_path / "sites" / "blue")
    done = CliRunner().invoke(app, ["audit", "ledger", str(tmp_path)])
    assert done.exit_code == 0 and "15 lines" in done.output and "averaging.train x3" in done.output
    assert "weights" in done.output and "count" in done.output
    lines = path.read_text().splitlines()
    lines[6] = lines[6].replace('"values": 0', '"values": 1')
    path.write_text("\n".join(lines) + "\n")
    done = CliRunner().invoke(app, ["audit", "ledger", str(tmp_path)])
    assert done.exception is not None
    assert isinstance(done.exception, InputError) and "line 8" in done.exception.message
    assert "amber" in done.output and "BROKEN" in done.output and "blue" in done.output


@pytest.mark.parametrize("text", ["[" * 5000, "{}", "5", "not json", '{"prev": "' + "0" * 64 + '"}'])
def test_what_is_no_ledger_is_told(text: str, tmp_path: Path) -> None:
    (tmp_path / LEDGER).write_text(text + "\n")
    with pytest.raises(InputError, match="line 1"):
        audit_ledger(tmp_path / LEDGER)


@pytest.mark.parametrize(
    "change",
    [
        {"time": "2026\x1b[2J"},
        {"step": "\u202e"},
        {"event": "left", "kind": "\x1b[31m", "round": 1, "values": 1},
        {"event": "left", "kind": "weights", "round": 1, "values": -1},
        {"event": "left", "kind": "weights", "round": True, "values": 1},
        {"event": "answered", "code": "x" * 300},
        {"event": "answered", "code": None, "bytes": 10**400},
    ],
    ids=str,
)
def test_a_ledger_from_elsewhere_steers_no_terminal(change: dict[str, Any], tmp_path: Path) -> None:
    """Its chain is right: whoever wrote it, made that too."""
    row = {"event": "asked", "time": "now", "step": "a.b", "bytes": 1, "prev": ORIGIN}
    for told, is_whole in ((row, True), (row | change, False)):
        line = json.dumps(told)
        (tmp_path / LEDGER).write_text(line + "\n")
        head = Head(1, len(line) + 1, hashlib.sha256(line.encode()).hexdigest())
        (tmp_path / HEAD).write_text(json.dumps(dataclasses.asdict(head)))
        if is_whole:
            assert audit_ledger(tmp_path / LEDGER).lines == 1
        else:
            with pytest.raises(InputError, match="line 1: it is not a line"):
                audit_ledger(tmp_path / LEDGER)


class Tap:
    """An engine that keeps every question and every answer as they cross."""

    crossed: list[tuple[Request, bytes | Failure]]

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        self.where_to_look = inner.where_to_look

    def call(self, requests: Sequence[Request], deadline: float | None) -> Iterator[tuple[str, bytes | Failure]]:
        asked = {request.site: request for request in requests}
        for site, outcome in self.inner.call(requests, deadline):
            Tap.crossed.append((asked[site], outcome))
            yield site, outcome

    def close(self) -> None:
        self.inner.close()


ENVELOPE = {"site", "step", "round", "nonce", "code", "release", "seconds"}


@pytest.mark.parametrize(
    ("method", "policy"),
    [("fedavg", {}), ("csac", {}), ("fedavg", {"allow": ["facts", "counts"]})],
    ids=["fedavg", "csac", "refused"],
)
def test_every_byte_on_the_wire_is_declared_and_listed(
    method: str, policy: Any, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Tap.crossed = []
    original = planning.local_engine
    monkeypatch.setattr(planning, "local_engine", lambda *args: Tap(original(*args)))
    own = {"csac": {"acquisition_epochs": 1, "calibration_epochs": 1}} if method == "csac" else {}
    config = make_config({"method": method, "data_dir": tiny_data, "policy": policy, **KEYS, **own})
    try:
        run(config, tmp_path / "run")
    except Exception:
        assert policy, "only the run in which weights are forbidden ends early"
    sites = {request.site for request, _ in Tap.crossed}
    listed = {
        site: [json.loads(line) for line in (tmp_path / "run/sites" / site / LEDGER).read_text().splitlines()]
        for site in sites
    }
    unlisted = {site: list(rows) for site, rows in listed.items()}
    for request, data in Tap.crossed:
        assert isinstance(data, bytes)
        rows = unlisted[request.site]
        asked = rows.pop(0)
        expected = {"event": "asked", "step": request.step, "round": request.round, "nonce": request.nonce}
        assert expected.items() <= asked.items()
        assert (asked["bytes"], asked["sha256"]) == (len(request.body), codec.sha256(request.body))
        envelope = codec.unpack(data)
        declared = kinds(STEPS[request.step].release)
        release = envelope["release"]
        if envelope["code"] is None:
            assert set(envelope) == ENVELOPE | {"clipped"} and set(release) == set(declared)
            for name, kind in declared.items():
                row = rows.pop(0)
                assert (row["event"], row["field"], row["kind"]) == ("left", name, kind.name)
                assert row["bytes"] == size_of(release[name])
        else:
            assert set(envelope) == ENVELOPE and release is None
        answered = rows.pop(0)
        assert (answered["event"], answered["code"]) == ("answered", envelope["code"])
        assert (answered["seconds"], answered["clipped"]) == (envelope["seconds"], envelope.get("clipped", 0))
        # Whatever else might be in the message would change its digest.
        assert (answered["bytes"], answered["sha256"]) == (len(data), codec.sha256(data))
        assert codec.pack(envelope) == data, "nothing but the envelope is in the message"
        assert without_spare_bytes(data), "the header is as short as it can be, and tensors fill the rest"
    assert all(rows == [] for rows in unlisted.values()), "and nothing is listed that did not cross"
    assert {row["step"] for row in listed["amber"]} >= {"handshake.introduce"}
    for site in sites:
        audit_ledger(tmp_path / "run/sites" / site / LEDGER)


def without_spare_bytes(data: bytes) -> bool:
    """Of a file in safetensors format, by its description alone and not by the code that writes it."""
    (length,) = struct.unpack("<Q", data[:8])
    entries = json.loads(data[8 : 8 + length])
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    inner = json.dumps(json.loads(entries["__metadata__"]["fedshift"]), separators=(",", ":"))
    ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
    return (
        data[8 : 8 + length] == text + b" " * (-len(text) % 8)
        and entries["__metadata__"] == {"fedshift": inner}
        and len(data) == 8 + length + max(ends, default=0)
    )


def size_of(value: Any) -> int:
    if hasattr(value, "nbytes"):
        return int(value.nbytes)
    if isinstance(value, dict):
        return sum(map(size_of, value.values()))
    if isinstance(value, list):
        return sum(map(size_of, value))
    return 8 if isinstance(value, int | float) else len(str(value))
