"""What may leave a site. A `Release` is a frozen dataclass whose every field declares its kind in its type;
policies, admission, the ledger and `fedshift privacy` all read the same declaration."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, cast, get_args, get_type_hints

from torch import Tensor


@dataclass(frozen=True)
class Kind:
    """One kind of thing that a site can release."""

    name: str
    meaning: str


Weights = Annotated[Mapping[str, Tensor], Kind("weights", "model parameters and normalisation statistics")]
Statistics = Annotated[Mapping[str, Tensor], Kind("statistics", "sums over many samples, such as means")]
Counts = Annotated[Tensor, Kind("counts", "how many samples fell into each cell of a table")]
Count = Annotated[int, Kind("count", "how many samples were used")]
Tally = Annotated[int, Kind("tally", "how many of something other than samples, such as parts that were left out")]
Metric = Annotated[float, Kind("metric", "a loss or score averaged over samples")]
Spectra = Annotated[
    Mapping[str, Tensor],
    Kind("spectra", "low-frequency Fourier amplitudes of single images (colour, contrast); other sites get them too"),
]
MixtureTerms = Annotated[
    Mapping[str, Tensor],
    Kind("mixture", "Gaussian components of reduced features, each made from many samples, with their counts"),
]
Features = Annotated[
    Mapping[str, Tensor],
    Kind(
        "features", "a network's feature vectors of single samples, by which these can be recognised or partly redrawn"
    ),
]
SINGLE_SAMPLES = ("spectra", "features")
"""Kinds that show single samples. A policy that does not allow them by name does not let them out."""
Masked = Annotated[
    Mapping[str, Tensor],
    Kind("masked", "numbers with a mask on each: only their sum over all sites that were asked can be read"),
]
Facts = Annotated[Mapping[str, Any], Kind("facts", "sizes, class names and versions, agreed before the first round")]

_ALL: tuple[Any, ...] = (
    Weights,
    Statistics,
    Counts,
    Count,
    Tally,
    Metric,
    Spectra,
    MixtureTerms,
    Features,
    Masked,
    Facts,
)
KINDS: tuple[str, ...] = tuple(get_args(declared)[1].name for declared in _ALL)
"""The names of all kinds, as policies list them."""


@dataclass(frozen=True)
class Release:
    """Base of everything that leaves a site. `summed` names the fields that the coordinator only ever adds up
    over sites, so that secure aggregation could hide each site's own value; `passed_on` those that it hands to other
    sites as they are."""

    summed: ClassVar[frozenset[str]] = frozenset()
    passed_on: ClassVar[frozenset[str]] = frozenset()


def kinds(release: type[Release]) -> dict[str, Kind]:
    """Field name -> declared kind. A field without a kind is a programming error: nothing leaves undeclared."""
    return _kinds(cast(Any, release))


@functools.cache
def _kinds(release: type[Any]) -> dict[str, Kind]:
    hints = get_type_hints(release, include_extras=True)
    found: dict[str, Kind] = {}
    for field in dataclasses.fields(release):
        declared = [m for m in getattr(hints[field.name], "__metadata__", ()) if isinstance(m, Kind)]
        if len(declared) != 1:
            raise TypeError(f"{release.__name__}.{field.name} must declare exactly one kind of release")
        found[field.name] = declared[0]
    return found
