"""A launcher that trains in this process: starting another process takes longer than a tiny training."""

from __future__ import annotations

from pathlib import Path

from fedshift.errors import FedshiftError
from fedshift.runs.config import make_config, read_config
from fedshift.runs.execute import run


class InProcess:
    """`trained` has the names of the folders it trained in."""

    def __init__(self) -> None:
        self.trained: list[str] = []

    def train(self, config: Path, folder: Path, log: Path, threads: int) -> int:
        self.trained.append(folder.name)
        try:
            run(make_config(read_config(config)), folder, resume=True)
        except FedshiftError as error:
            log.write_text(error.message)
            return error.exit_code
        return 0

    def stop(self) -> None:
        return None
