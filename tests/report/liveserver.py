"""The live page's server, running in a thread while a test looks at it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedshift.report.live import LiveServer, open_server


@contextmanager
def serving(folder: Path) -> Iterator[LiveServer]:
    folder.mkdir(exist_ok=True)
    with open_server(folder, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.stopping.set()
            server.shutdown()
            thread.join(10)
