"""Everything you need to write your own method, network, data set, aggregation rule or engine, in one import.

A method has two halves. *Steps* run at the sites, where the data is: functions that are decorated with `@step`, get a
view of the site (`Labelled` or `Unlabelled`) and return a `Release`, a frozen dataclass whose fields say what leaves
the site. The class runs at the coordinator and asks sites through `fed.ask`. `examples/fedprox.py` is a complete one.
"""

from __future__ import annotations

from fedshift.data import Dataset, Domain, Split, register_dataset
from fedshift.federation.aggregation import Gathered, RobustRule, Rule, register_rule
from fedshift.federation.federation import Federation, Replies
from fedshift.federation.labels import label_loss
from fedshift.federation.plan import ModelSpec, Plan, Training
from fedshift.federation.releases import (
    Count,
    Counts,
    Features,
    Metric,
    MixtureTerms,
    Release,
    Spectra,
    Statistics,
    Tally,
    Weights,
)
from fedshift.federation.site import Labelled, Unlabelled
from fedshift.federation.step import Step, step
from fedshift.functional.averaging import weighted_mean
from fedshift.functional.losses import cross_entropy, kl_divergence, soft_cross_entropy
from fedshift.methods import register_method
from fedshift.methods.base import SHARED, About
from fedshift.methods.local import augmentation, plain_network, sgd, train_batches, weights_of, with_weights
from fedshift.nn.archs import Arch, build_network, register_net
from fedshift.nn.network import Backbone, Network
from fedshift.registry import allow_import
from fedshift.rng import Rng
from fedshift.runs.engines import ENGINES, Connection, EngineKind

__all__ = [
    "ENGINES",
    "SHARED",
    "About",
    "Arch",
    "Backbone",
    "Connection",
    "Count",
    "Counts",
    "Dataset",
    "Domain",
    "EngineKind",
    "Features",
    "Federation",
    "Gathered",
    "Labelled",
    "Metric",
    "MixtureTerms",
    "ModelSpec",
    "Network",
    "Plan",
    "Release",
    "Replies",
    "Rng",
    "RobustRule",
    "Rule",
    "Spectra",
    "Split",
    "Statistics",
    "Step",
    "Tally",
    "Training",
    "Unlabelled",
    "Weights",
    "allow_import",
    "augmentation",
    "build_network",
    "cross_entropy",
    "kl_divergence",
    "label_loss",
    "plain_network",
    "register_dataset",
    "register_method",
    "register_net",
    "register_rule",
    "sgd",
    "soft_cross_entropy",
    "step",
    "train_batches",
    "weighted_mean",
    "weights_of",
    "with_weights",
]
