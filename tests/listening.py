"""A run's progress that keeps what is said."""

from __future__ import annotations

from fedshift.runs.progress import Silent


class Heard(Silent):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)
