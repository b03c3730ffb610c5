"""What people use for tables, as rows beside the methods: gradient-boosted trees, at each site alone and on all rows in
one place (a bound). And the area under the ROC curve, where there are two classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedshift.bench.jobs import Column
from fedshift.bench.records import Record
from fedshift.data.domain import Dataset, Domain, Split
from fedshift.federation.plan import Setting
from fedshift.methods.base import SHARED
from fedshift.runs.api import Run, as_inputs
from fedshift.runs.files.model import probabilities

ALONE, POOLED = "trees, each site alone", "trees, all rows in one place"
AUC = "auc"
_AT_ONCE = 256


def tree_records(dataset: Dataset, columns: Sequence[Column], setting: Setting, seeds: Sequence[int]) -> list[Record]:
    """A record per row, held-out site and seed. Alone means: the mean over the sources, each trained by itself."""
    domains = {name: dataset.load(name) for name in dataset.domains}
    found = []
    for seed in seeds:
        for column in columns:
            held = held_out_samples(domains[column.label], setting)
            sources = [domains[name].train for name in column.settings["sources"]]
            alone = [_scores(_grown([own], seed), held, len(dataset.classes)) for own in sources]
            pooled = _scores(_grown(sources, seed), held, len(dataset.classes))
            means = {key: float(np.mean([scores[key] for scores in alone])) for key in alone[0]}
            for row, scores in ((ALONE, means), (POOLED, pooled)):
                found.append(_record(row, column, dataset.name, setting, seed, scores))
    return found


def with_auc(records: Sequence[Record], dataset: Dataset, runs: Path) -> list[Record]:
    """The records of two-class trainings with the area under the ROC curve of the last round's shared model."""
    if len(dataset.classes) != 2 or dataset.task != "classification":
        return list(records)
    found = []
    for record in records:
        run = Run(runs / record.job)
        saved = run.model()
        if SHARED not in saved.models or record.target is None:
            found.append(record)
            continue
        net = saved.network(SHARED)
        held = held_out_samples(dataset.load(record.target), "adapt" if record.setting == "adapt" else "generalize")
        parts = [held.inputs[at : at + _AT_ONCE] for at in range(0, len(held), _AT_ONCE)]
        shares = [probabilities(net, as_inputs(np.array(part), saved.header.input_shape)).numpy() for part in parts]
        area = auc(np.concatenate(shares)[:, 1], np.asarray(held.labels))
        found.append(replace(record, scores={t: {**s, AUC: area} for t, s in record.scores.items()}))
    return found


def held_out_samples(domain: Domain, setting: Setting) -> Split:
    """What a held-out site is scored on: all that is labelled, unless a test split was given or it is adapted to."""
    parts = [domain.test] if setting == "adapt" or domain.test_given else [domain.test, domain.train, domain.val]
    parts = [part for part in parts if part.labels is not None and len(part)]
    labels: NDArray[Any] = np.concatenate([np.asarray(part.labels) for part in parts])
    return Split(np.concatenate([part.inputs for part in parts]), labels)


def auc(scores: NDArray[Any], labels: NDArray[Any]) -> float:
    """The share of pairs of a positive and a negative sample in which the positive one has the higher score; ties count
    half. 0.5 where there are no such pairs."""
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(labels == 1, scores)) if 0 < (labels == 1).sum() < len(labels) else 0.5


def _grown(parts: Sequence[Split], seed: int) -> tuple[Any, NDArray[np.bool_]]:
    """scikit-learn's trees with its defaults, which handle missing values, and the columns they use. Where there is one
    class only, that is the answer."""
    from sklearn.dummy import DummyClassifier
    from sklearn.ensemble import HistGradientBoostingClassifier

    x = np.concatenate([part.inputs for part in parts])
    y = np.concatenate([np.asarray(part.labels) for part in parts])
    # A column that is missing in every row has no place to be split at.
    known = ~np.isnan(x).all(axis=0)
    trees = HistGradientBoostingClassifier(random_state=seed) if len(np.unique(y)) > 1 else DummyClassifier()
    return trees.fit(x[:, known], y), known


def _scores(grown: tuple[Any, NDArray[np.bool_]], held: Split, classes: int) -> dict[str, float]:
    trees, inputs = grown[0], held.inputs[:, grown[1]]
    labels = np.asarray(held.labels)
    accuracy = float((trees.predict(inputs) == labels).mean())
    scores = {"last": accuracy, "source_val": accuracy, "oracle": accuracy}
    if classes == 2:
        seen = list(trees.classes_)
        positive = trees.predict_proba(inputs)[:, seen.index(1)] if 1 in seen else np.zeros(len(labels))
        scores[AUC] = auc(positive, labels)
    return scores


def _record(row: str, column: Column, dataset: str, setting: Setting, seed: int, scores: dict[str, float]) -> Record:
    return Record(
        job="",
        row=row,
        column=column.label,
        method="trees",
        setting=setting,
        dataset=dataset,
        sources=list(column.settings["sources"]),
        target=column.label,
        home=None,
        seed=seed,
        scores={column.label: scores},
        rounds=[],
        val={},
        test={},
        notes={},
        settings={},
        bytes={},
        seconds=0.0,
        counters={},
        model_sha256="",
    )
