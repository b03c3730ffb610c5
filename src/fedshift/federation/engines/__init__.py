"""Who stands behind the door. An engine carries requests to sites and brings back bytes; it understands neither."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # Who only passes requests on, as a site's part of an external engine does, need not load torch.
    from fedshift.federation.step import Request


REASONS = frozenset({"late", "crashed", "unreachable", "refused"})


@dataclass(frozen=True)
class Failure:
    """No answer came, for one of `REASONS`: `refused` is a site that could not read the question."""

    reason: str

    @classmethod
    def told(cls, reason: object) -> Failure:
        """What another machine gives as the reason; its own words go nowhere."""
        return cls(reason if isinstance(reason, str) and reason in REASONS else "crashed")


class Engine(Protocol):
    where_to_look: str
    """A sentence that tells the user where a site's own log is; `<site>` in it stands for the site's name."""

    def call(self, requests: Sequence[Request], deadline: float | None) -> Iterator[tuple[str, bytes | Failure]]:
        """Every request's outcome, in any order, each site once."""

    def close(self) -> None:
        """Ends every process and connection."""
