"""The engine that a federation sees: requests become questions to sites on other machines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fedshift.federation import codec
from fedshift.federation.engines import Failure
from fedshift.federation.engines.nvflare.link import Link, Question
from fedshift.federation.engines.nvflare.status import Status
from fedshift.federation.plan import Plan
from fedshift.federation.site import SiteSpec
from fedshift.federation.step import Request


class Nvflare:
    """`run` names the run at the sites, also when it is resumed. Without a `plan` sites can only be surveyed.

    Every question carries the plan and the site's part in it, a few kilobytes: a site that was restarted needs no
    other word to go on.
    """

    def __init__(self, link: Link, run: str, specs: Sequence[SiteSpec], plan: Plan | None) -> None:
        self._link = link
        self._run = run
        self._parts = {spec.name: _part(spec) for spec in specs}
        self._plan = codec.plain(plan) if plan else None
        self._round = 0
        self._status = Status(link.coordinator.status_file)
        self.where_to_look = f"What happened is in the site's own log: runs/{run}/site.log in its kit."

    def call(self, requests: Sequence[Request], deadline: float | None) -> Iterator[tuple[str, bytes | Failure]]:
        if requests and requests[0].round > self._round:
            self._round = requests[0].round
            self._link.welcome_back()
        for site, outcome in self._link.call([self._question(request) for request in requests], deadline):
            self._status.note(site, outcome.reason if isinstance(outcome, Failure) else "answered")
            yield site, outcome
        self._status.save(self._run, self._round)

    def close(self) -> None:
        self._link.close()

    def _question(self, request: Request) -> Question:
        head = {"run": self._run, "plan": self._plan, "part": self._parts[request.site], "request": request.head}
        return Question(request.site, head, request.body)


def _part(spec: SiteSpec) -> dict[str, Any]:
    """What the coordinator decides for a site: what it plays and how its data is read, never where that is."""
    source = codec.plain(spec.source)
    return {
        "role": spec.role,
        "domains": list(spec.domains),
        "reading": {key: source[key] for key in ("image_size", "tile", "task", "classes")},
        "train_cap": spec.train_cap,
        "train_share": spec.train_share,
        "copies": codec.plain(spec.copies),
    }
