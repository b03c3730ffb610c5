"""How far models are on their way: what NVFlare has sent and received of each, told to whoever waits.

NVFlare sends a message in pieces and keeps a task for each message that is under way, in the process at either end. It
offers no other way to ask, so its own tables are read, and whatever does not look as expected is left out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from nvflare.fuel.f3.streaming.byte_receiver import RxTask
from nvflare.fuel.f3.streaming.byte_streamer import ByteStreamer

from fedshift.beats import Transfer

SMALLEST = 2**20
"""Bytes of a message that is worth a word."""
_EVERY = 1.0


def under_way() -> list[Transfer]:
    """What this process is sending and receiving, by the name of who is at the other end."""
    found = []
    with suppress(Exception):
        with ByteStreamer.map_lock:
            sending = list(ByteStreamer.tx_task_map.values())
        found += [_transfer(task.target, True, task.offset_ack, task.stream.get_size()) for task in sending]
    with suppress(Exception):
        with RxTask.map_lock:
            coming = [task for task in RxTask.rx_task_map.values() if not task.completed and not task.failed]
        found += [_transfer(task.origin, False, task.received_offset, task.size) for task in coming]
    return [one for one in found if one.total >= SMALLEST]


def _transfer(peer: str, is_sent: bool, done: int, total: int) -> Transfer:
    """Of the path `site.job` the first part is the site."""
    return Transfer(str(peer).partition(".")[0], is_sent, min(int(done), int(total)), int(total))


class Reporter:
    """Tells about every second, from a thread of its own, what is under way, and once more when nothing is."""

    def __init__(self, tell: Callable[[Sequence[Transfer]], None]) -> None:
        self._tell = tell
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5)

    def _work(self) -> None:
        had_some = False
        while not self._stop.wait(_EVERY):
            found = under_way()
            if found or had_some:
                with suppress(OSError, ValueError):  # Nobody listens any more.
                    self._tell(found)
            had_some = bool(found)
