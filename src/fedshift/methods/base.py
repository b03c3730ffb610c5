"""What a method is: a description, hyper-parameters, and the coordinator's half of its algorithm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

from torch import nn

from fedshift.data.domain import Task
from fedshift.federation.federation import Federation
from fedshift.federation.plan import Plan, Setting
from fedshift.federation.releases import Weights
from fedshift.federation.step import Step
from fedshift.methods.cost import Formula
from fedshift.nn.network import Network

Data = Literal["federated", "source-copies", "pooled", "target-copies", "target-labels"]

SHARED = ""
"""The name under which a method keeps the model that is not any site's own."""


@dataclass(frozen=True)
class About:
    """`data` says who may see what: `federated` is the setting's own rule. `source-copies` gives every client a copy of
    the home's labelled data. `pooled` brings all sources to one place, `target-copies` the clients' data to the home,
    `target-labels` uses the labels of the targets: upper bounds to compare with, never something to deploy.
    `defaults` are the paper's values of common configuration keys. `pretrained` are values of common and own keys for
    networks that start from given weights (`PRETRAINED` holds those of all methods), `tables` those for table rows,
    `masks` those for segmentation from scratch.
    `hyper` is what makes a variant of a method: keys that cannot be set to anything else. `unsent` are fields of its
    releases that it therefore leaves
    empty. With `needs_all` a run ends where one site gives no answer; otherwise the quorum decides. With
    `uses_statistics` it reads or replaces what BatchNorm layers remember."""

    name: str
    settings: tuple[Setting, ...]
    paper: str
    needs: str = ""
    tasks: tuple[Task, ...] = ("classification", "segmentation")
    data: Data = "federated"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    pretrained: Mapping[str, Any] = field(default_factory=dict)
    tables: Mapping[str, Any] = field(default_factory=dict)
    masks: Mapping[str, Any] = field(default_factory=dict)
    hyper: Mapping[str, Any] = field(default_factory=dict)
    unsent: frozenset[str] = frozenset()
    needs_all: bool = False
    uses_statistics: bool = False
    needs_statistics: Callable[[Any], str] | None = None
    """With `uses_statistics`: from the method's own keys, why they cannot be frozen, as a sentence; empty: they can be.
    None: they never can."""
    draws_sites: bool = False
    """Whether a round may be held with some of the sites (`sites_per_round`); the method asks those of
    `Federation.taking_part`."""
    all_because: str = ""
    """Why it may not, to go on after "because"."""
    whole_because: str = ""
    """Why it cannot train on squares of pictures (`tile`), to go on after "because"."""
    norm: Literal["average", "own"] | None = None
    """What `norm: auto` is for this method, where its definition says so; with `own` it cannot be anything else."""
    best_norm: Literal["own"] | None = None
    """What `norm: auto` is where there are targets and the network starts from scratch, because it was measured to be
    best (docs/results.md)."""
    aggregation: Literal["any", "clipped", "own"] = "any"
    """Which rules the key `aggregation` can choose: any, because models are averaged by `Federation.average`; the mean
    and `clipped`, because the method weights clipped updates in its own way; or none, because nothing is averaged."""
    counters: Mapping[str, str] = field(default_factory=dict)
    """Counter -> one sentence on what it means, for reports. Every name that the method counts is here."""
    time_factor: float = 1.0
    """How many times as long as in FedAvg an image takes, forward and backward, to estimate the time of a benchmark. In
    the setting multi-adapt it is per image of the home, and includes the work on up to four clients' copies of it."""
    cost: Formula | None = None
    """What the method costs a site; None: there is no closed formula."""
    revision: int = 0
    """Raised when the method computes something else under the same keys: trainings recorded before do not count."""

    @property
    def is_bound(self) -> bool:
        """Whether it sees what no federation may."""
        return self.data in ("pooled", "target-copies", "target-labels")


PRETRAINED: Mapping[str, Any] = {"batch_size": 16, "lr": 0.002, "backbone_lr_factor": 0.1, "probe_epochs": 10}
"""What keeps a pre-trained network pre-trained, beside frozen statistics: chosen by source validation on photographs
(docs/networks.md)."""


class Method(Protocol):
    """One paper, one class, one file. `State` is a frozen dataclass of tensors and numbers."""

    hyper_type: ClassVar[type[Any]]
    steps: ClassVar[tuple[Step[Any], ...]]
    """Every step it asks sites for: what `fedshift privacy` reads."""
    state_type: ClassVar[type[Any]]

    def __init__(self, hyper: Any) -> None: ...

    def init(self, base: Network, fed: Federation) -> Any:
        """The state before round 1. `base` is the network of the plan, pre-trained where the user gave weights."""

    def round(self, state: Any, fed: Federation) -> Any:
        """One round of the paper's algorithm."""

    def models(self, state: Any) -> Mapping[str, Weights]:
        """Weights for `network`: by site for those that have their own, under `SHARED` for everyone else."""

    @staticmethod
    def network(plan: Plan) -> nn.Module:
        """The module that predicts: images or rows to scores whose softmax is the prediction."""


@dataclass(frozen=True)
class Entry:
    """A line of the table of methods."""

    about: About
    implementation: type[Method]
