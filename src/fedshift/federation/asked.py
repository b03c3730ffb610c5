"""What a site on its own machine remembers of what it was asked, so that two answers do not tell what none of them may:
the answers of the last round, the plan of the run, and of which samples answers were made."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedshift.errors import FedshiftError, SiteError
from fedshift.federation import codec
from fedshift.federation.site import SiteHost
from fedshift.files import locked, read_bounded, write_atomically, write_failed

MOST_BYTES = 256 * 2**20
"""Of sets of samples that are remembered."""
_PIECE = 16 * 2**20
_BITS = np.array([bin(byte).count("1") for byte in range(256)], np.uint8)
_OPEN = ("rounds", "threads", "version")
"""What a run that is resumed may have others of: nothing that is computed in a round depends on the first of them but
the rates, and nothing at all on the others but the last bits."""


class KeptAnswers:
    """What a site has answered in the last round that it was asked in, as files `<round>-<number>-<question>`.

    A question is its step, round and payload under the plan. Asked again, it gets the very same answer: a step may
    have changed the site's state, so that to run it twice would give a second, different look at the same samples.
    Another question of the same `Step.number` is refused for the same reason.

    Rounds only go forward. To go on after an interruption, the coordinator says `rewind_to` in the handshake. Then the
    state is that of the earlier round too, and running the steps again gives the same weights and, because noise is
    made from these, the same noise. Another payload may be legitimate then, because sites may have been missing the
    first time. It is another look all the same: the policy's `max_resumes` says how often it is to be had.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, round: int, number: str, question: str) -> Any | None:
        """The answer to a question. Raises `SiteError` if there is one to another question of that number."""
        path = self._path(round, number, question)
        if path.exists():
            return codec.unpack(path.read_bytes())
        if any(self._folder.glob(f"{round}-{number}-*.safetensors")):
            raise SiteError("site-policy", f"asked in round {round} with another payload: a step is answered once")
        return None

    def save(self, round: int, number: str, question: str, tree: Any) -> None:
        write_atomically(self._path(round, number, question), codec.pack(tree))
        for path, of in self._rounds().items():
            if of < round:
                path.unlink(missing_ok=True)

    def rewind(self, round: int) -> None:
        for path, of in self._rounds().items():
            if of > round:
                path.unlink(missing_ok=True)

    @property
    def round(self) -> int:
        """The last round that was answered in."""
        return max(self._rounds().values(), default=0)

    def _path(self, round: int, number: str, question: str) -> Path:
        return self._folder / f"{round}-{number}-{question}.safetensors"

    def _rounds(self) -> dict[Path, int]:
        return {path: int(path.name.partition("-")[0]) for path in self._folder.glob("*-*.safetensors")}


def require_same_plan(host: SiteHost) -> None:
    """Refuses another plan, or another part in it, than the run began with."""
    path = host.spec.folder / "plan"
    mine = _digest_of(host)
    if not path.exists():
        write_atomically(path, mine.encode())
    if read_bounded(path, 64) != mine.encode():
        raise SiteError("site-policy", "asked under another plan than the one that this run began with")


def _digest_of(host: SiteHost) -> str:
    spec, plan = host.spec, codec.plain(host.plan)
    plan["training"] = {key: value for key, value in plan["training"].items() if key not in _OPEN}
    told = {key: value for key, value in plan.items() if key not in _OPEN}
    reading = [spec.source.image_size, spec.source.task, spec.source.classes]
    part = [spec.role, spec.domains, reading, spec.train_cap, spec.train_share, spec.copies]
    return codec.sha256(json.dumps([told, codec.plain(part)], sort_keys=True).encode())


class UsedSamples:
    """The sets of samples that answers were made of, in all runs at a site: a file of bits for each set of data. Two of
    them are the same or differ by `least` samples: whoever asks for both with the same weights could else subtract one
    answer from the other, and would have what the few that differ contributed."""

    def __init__(self, folder: Path, least: int) -> None:
        self._folder, self._least = folder, least

    def add(self, domains: Sequence[str], name: str, used: NDArray[np.bool_]) -> None:
        """Remembers a set before the answer leaves that was made of it. Raises `SiteError` if it is too much like one
        of those before."""
        about = json.dumps([list(domains), name, len(used)])
        path = self._folder / f"{hashlib.sha256(about.encode()).hexdigest()[:32]}.bits"
        row = np.packbits(used)
        with locked(self._folder / ".lock"):
            nearest = self._nearest(path, row)
            if nearest == 0:
                return
            if nearest is not None and nearest < self._least:
                raise SiteError(
                    "site-policy",
                    f"the samples of this answer differ from those of an earlier answer by {nearest}, and"
                    f" policy.min_samples asks for {self._least}, or for none: use whole passes over all samples, or"
                    " another seed",
                )
            try:
                with path.open("ab") as file:
                    file.write(row.tobytes())
            except OSError as error:
                raise write_failed(path, error) from error

    def _nearest(self, path: Path, row: NDArray[np.uint8]) -> int | None:
        """By how many samples the set that is most like `row` differs from it."""
        if not path.exists():
            return None
        size = path.stat().st_size
        if size % len(row):
            raise FedshiftError("run-corrupt", f"{path} is damaged: restore it from a copy")
        if size + len(row) > MOST_BYTES:
            raise SiteError("site-policy", "too many different sets of samples were asked about")
        rows = np.fromfile(path, np.uint8).reshape(-1, len(row))
        step = max(1, _PIECE // len(row))
        return min(int(_BITS[rows[at : at + step] ^ row].sum(1, np.int64).min()) for at in range(0, len(rows), step))
