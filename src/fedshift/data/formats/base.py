"""What all kinds of data have in common before they are read, so that one survey and one check serve them all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fedshift.data.decoding import Fit, Size
from fedshift.data.domain import Domain, Task
from fedshift.data.splits import SplitName
from fedshift.errors import InputError

if TYPE_CHECKING:
    from fedshift.data.formats.masks import MaskCode

CLASS_FILE = "classes.txt"

TOLERATED = 0.01
"""Up to this share of a domain may be unreadable; the rest is used and the report lists what was left out."""

Progress = Callable[[str, int, int], None]
"""Called while a domain is decoded for the first time: its name, images done, images in all."""


@dataclass(frozen=True)
class Problem:
    """A reason why a run cannot start: the code of the error and its message."""

    code: str
    message: str


@dataclass(frozen=True)
class Unread:
    """Files of a domain that are not read: how many, why, and the first of them."""

    count: int
    why: str
    first: str


@dataclass(frozen=True)
class Sample:
    """One sample as the check sees it: a name a person can find it by, its split, the hash of its content."""

    name: str
    split: SplitName
    digest: str


@dataclass(frozen=True)
class InputFormat:
    """What all domains of a data set agree on before any is read. Tables have no size; only masks have a code. With
    `tile`, pictures are cut into squares of so many pixels, and `size` is that of the largest; `scaled_to`: see
    `Dataset`."""

    classes: tuple[str, ...]
    size: Size | None = None
    fit: Fit = "crop"
    code: MaskCode | None = None
    tile: int | None = None
    scaled_to: int | None = None


class RawDomain(Protocol):
    """One domain of a data set, not read yet."""

    @property
    def name(self) -> str: ...

    @property
    def task(self) -> Task | None:
        """None without labels: such a domain fits either task."""

    @property
    def problems(self) -> tuple[Problem, ...]: ...

    @property
    def warnings(self) -> tuple[str, ...]: ...

    def class_counts(self) -> Counter[str] | None:
        """Samples of each class, including classes without any; None if there are no class labels."""

    def sizes(self) -> Counter[Size]:
        """Images of each size; empty for tables."""

    def read(self, form: InputFormat, progress: Progress | None = None) -> Domain: ...

    def samples(self) -> list[Sample]: ...


def printable(text: object) -> str:
    """A name that is safe to show: control characters and others that cannot be printed become escapes."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in str(text))


def refuse_many_skipped(domain: Domain) -> None:
    """Raises if more of a domain is unreadable than a run may leave out."""
    count = len(domain.skipped)
    total = count + sum(len(split) for split in (domain.train, domain.val, domain.test))
    if count > TOLERATED * total:
        first = domain.skipped[0]
        raise InputError(
            first.code,
            f"{count} of {total} samples of {domain.name} cannot be used; the first is {first.file}: "
            f"{first.reason}. Repair or remove them (`fedshift check-data` lists all).",
        )
