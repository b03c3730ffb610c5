"""What is told of models that are on their way."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare")

from nvflare.fuel.f3.streaming.blob_streamer import BlobStream
from nvflare.fuel.f3.streaming.byte_receiver import RxTask
from nvflare.fuel.f3.streaming.byte_streamer import ByteStreamer, TxTask

from fedshift import beats
from fedshift.beats import Transfer, tell_transfers, transfers_in_words
from fedshift.federation.engines.nvflare import executor as site_half
from fedshift.federation.engines.nvflare.executor import SiteDoor
from fedshift.federation.engines.nvflare.link import _Bridge
from fedshift.federation.engines.nvflare.transfers import under_way
from fedshift.federation.engines.workers import write_frame
from fedshift.runs.heartbeat import Heartbeat
from fedshift.runs.progress import Silent

MB = 10**6


@pytest.fixture(autouse=True)
def nothing_under_way() -> Iterator[None]:
    yield
    beats.note_transfers(())
    ByteStreamer.tx_task_map.clear()
    RxTask.rx_task_map.clear()


def sending(target: str, size: int, acknowledged: int) -> None:
    cell: Any = None  # Needed to send only.
    task = TxTask(cell, 2**18, "channel", "topic", target, {}, BlobStream(bytes(size), None), False, True, False)
    task.offset_ack = acknowledged
    ByteStreamer.tx_task_map[task.sid] = task


def receiving(origin: str, size: int, received: int) -> None:
    cell: Any = None
    task = RxTask(7, origin, cell)
    task.size, task.received_offset = size, received
    RxTask.rx_task_map[origin, 7] = task


def test_what_nvflare_sends_and_receives_is_read_by_site() -> None:
    sending("north.0a1b", 45 * MB, 12 * MB)
    sending("south.0a1b", 1000, 0)  # A question without a model.
    receiving("east.0a1b", 44 * MB, 2 * MB)
    assert under_way() == [Transfer("north", True, 12 * MB, 45 * MB), Transfer("east", False, 2 * MB, 44 * MB)]
    RxTask.rx_task_map["east.0a1b", 7].completed = True
    assert [one.peer for one in under_way()] == ["north"]


def test_words_name_a_few_sites_and_count_many() -> None:
    two = [Transfer("east", True, 12 * MB, 45 * MB), Transfer("west", True, 19 * MB, 45 * MB)]
    back = Transfer("north", False, 2_500_000, 45 * MB)
    assert transfers_in_words([*two, back]) == ("sending 31 of 90 MB to east, west, receiving 2.5 of 45 MB from north")
    many = [Transfer(f"s{n}", False, MB, 2 * MB) for n in range(5)]
    assert transfers_in_words(many) == "receiving 5.0 of 10 MB from 5 sites" and transfers_in_words([]) == ""


def test_a_run_hears_of_transfers_through_its_bridge(tmp_path: Path) -> None:
    bridge, heart = _Bridge(), Heartbeat(Silent(), tmp_path / ".progress")
    heart.asked("averaging.train", ("north", "south"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.connect(bridge.address)
        with server.makefile("wb") as replies:
            write_frame(replies, json.dumps({"sites": ["north", "south"]}).encode())
            assert bridge.connected(timeout=5)
            told = [{"peer": "north", "is_sent": True, "done": 12 * MB, "total": 45 * MB}]
            write_frame(replies, json.dumps({"transfers": told}).encode())
            write_frame(replies, b"")
            answer = {"call": 0, "site": "north", "outcome": "reply"}
            write_frame(replies, json.dumps(answer).encode())
            write_frame(replies, b"body")
            assert bridge._answers.get(timeout=5) == (answer, b"body"), "what is told of transfers is no answer"
            assert heart.moment().doing == (
                "train, 0 of 2 sites done, waiting for north, south, sending 12 of 45 MB to north"
            )
    assert bridge._answers.get(timeout=5) is None and tell_transfers() == ""
    bridge.close()


def test_a_site_logs_transfers_that_take_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(site_half.time, "monotonic", lambda: now[0])
    door = SiteDoor()
    door._log = tmp_path / "site.log"
    for _ in range(15):
        door._note([Transfer("server", False, 12 * MB, 45 * MB)])
        now[0] += 1
    lines = door._log.read_text().splitlines()
    assert len(lines) == 2, "after 3 and 13 seconds"
    assert all(line.endswith("+00:00 receiving 12 of 45 MB from server") for line in lines)
    door._note([])
    door._note([Transfer("server", False, 0, 45 * MB)])
    assert len(door._log.read_text().splitlines()) == 2, "another one that has just begun"
