"""How long jobs will take, roughly: from what training a picture was measured to take on one core."""

from __future__ import annotations

import math
from collections.abc import Iterable

from fedshift.bench.jobs import Job

START = 5.0
"""Seconds for a process to start, read its data and write its results."""

MILLISECONDS = {"digits-copa": 1.7, "digits-csac": 0.6, "digits-dualadapt": 1.7, "segnet-small": 6.0}
"""For a picture in FedAvg, forward and back."""

TIMES = {
    "copa": 2.7,
    "copa-uda": 3.5,
    "csac": 1.5,
    "feddg": 3.0,
    "fedadg": 1.4,
    "kd3a": 2.0,
    "shot": 1.5,
    "fada": 2.5,
    "fed-dan": 2.0,
    "fed-dann": 2.0,
    "fed-mcd": 4.0,
    "cent-mcd": 4.0,
    "dualadapt": 2.0,
    "fed-oracle": 3.0,
}
"""How many times as long a picture takes in other methods."""

TRAINING_PICTURES = {"digits": 800, "rotated-digits": 1000, "streets": 200}
SITES = {"digits": 4, "rotated-digits": 5, "streets": 4}


def seconds_of(jobs: Iterable[Job]) -> float:
    """Of all of them one after the other, on built-in data."""
    return sum(_seconds(job) for job in {job.digest: job for job in jobs}.values())


def _seconds(job: Job) -> float:
    config = job.config
    dataset = config.dataset or "digits"
    pictures = min(config.train_per_site or TRAINING_PICTURES[dataset], TRAINING_PICTURES[dataset])
    rounds, hyper = config.rounds or 20, config.hyper
    epochs: float = rounds * (config.local_epochs or 1.0)
    if config.method == "csac":
        epochs = hyper["acquisition_epochs"] + rounds * hyper["calibration_epochs"]
    if config.home:  # The home works, and clients on their small share.
        seen = pictures * (epochs + hyper.get("pretrain_epochs", 0.0)) * (1 + SITES[dataset] * config.client_fraction)
    else:
        seen = pictures * epochs * (len(config.sources) if config.sources else SITES[dataset])
    a_round = 0.15 * rounds
    return float(START + a_round + seen * MILLISECONDS.get(config.arch, 2.0) / 1000 * TIMES.get(config.method, 1.0))


def in_words(seconds: float) -> str:
    minutes = max(1, math.ceil(seconds / 60))
    return "about a minute" if minutes == 1 else f"about {minutes} minutes"
