"""CSAC, Fig. 8: t-SNE of the features of finished runs, coloured by class and by domain, on this machine's own data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedshift.bench.figures import new_figure, saved
from fedshift.bench.records import Record
from fedshift.bench.sheets import Sheet
from fedshift.bench.suite import Order
from fedshift.data import open_dataset
from fedshift.nn.network import Network
from fedshift.runs.api import Run, as_inputs
from fedshift.runs.config import make_config, read_config
from fedshift.runs.features import flatten
from fedshift.runs.planning import data_source

POINTS = 1000
"""Most pictures that are placed: t-SNE takes seconds for these."""


def feature_maps(records: Sequence[Record], order: Order) -> tuple[list[Sheet], list[Path]]:
    """A picture for each target and seed: a column a method, classes above and domains below. The sheet says how well
    features separate classes (higher is better) and domains (lower is better): mean silhouettes, from -1 to 1."""
    from sklearn.metrics import silhouette_score

    files, rows = [], {}
    for place in dict.fromkeys((record.column, record.seed) for record in records):
        own = [record for record in records if (record.column, record.seed) == place]
        figure, axes = new_figure(len(own), rows=2)
        for number, record in enumerate(own):
            features, classes, domains, names = features_of(order.work / "jobs" / record.job)
            points = flatten(features)
            above, below = axes[number], axes[len(own) + number]
            above.scatter(points[:, 0], points[:, 1], c=classes % 20, cmap="tab20", s=6)
            for domain, name in enumerate(names):
                below.scatter(*points[domains == domain].T, s=6, label=name)
            below.legend(fontsize="small")
            above.set(title=f"{record.row}: classes", xticks=[], yticks=[])
            below.set(title=f"{record.row}: domains", xticks=[], yticks=[])
            by_class, by_domain = (float(silhouette_score(features, groups)) for groups in (classes, domains))
            rows[f"{record.row}, {place[0]}, seed {place[1]}"] = [by_class, by_domain]
        files.append(saved(figure, order.out / f"csac-fig8-{place[0]}-seed{place[1]}.png"))
    return [Sheet("separation of features (silhouette)", ("by class", "by domain"), rows)], files


def features_of(folder: Path) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], tuple[str, ...]]:
    """Features `(n, d)` of test pictures of all domains by the run's last model, their classes and domains `(n,)`, and
    the domains' names."""
    net = Run(folder).model().network()
    if not isinstance(net, Network):
        raise TypeError(f"{type(net).__name__} has no single extractor to take features from")
    dataset = open_dataset(data_source(make_config(read_config(folder / "config.yaml"))))
    features, classes, domains = [], [], []
    share = POINTS // len(dataset.domains)
    for number, name in enumerate(dataset.domains):
        split = dataset.load(name).test
        # Evenly over the split, which may be sorted by class.
        chosen = np.unique(np.linspace(0, len(split) - 1, min(share, len(split))).astype(np.int64))
        part = split.take(chosen)
        with torch.inference_mode():
            features.append(net.features(as_inputs(part.inputs, dataset.input_shape)).flatten(1).numpy())
        classes.append(np.zeros(len(part), np.int64) if part.labels is None else part.labels)
        domains.append(np.full(len(part), number))
    return np.concatenate(features), np.concatenate(classes), np.concatenate(domains), dataset.domains
