"""How long jobs will take, roughly: from what training a picture was measured to take on one core."""

from __future__ import annotations

import math
from collections.abc import Iterable

from fedshift.bench.jobs import Job

START = 5.0
"""Seconds for a process to start, read its data and write its results."""

A_ROUND = 0.15
"""Seconds for sending models around and scoring them."""

MILLISECONDS = {
    ("digits-copa", 16): 0.7,
    ("digits-csac", 16): 0.4,
    ("digits-dualadapt", 20): 0.75,
    ("segnet-small", None): 6.0,
}
"""For a picture in FedAvg, forward and back, by network and side of the picture."""

TIMES = {
    "copa": 2.8,
    "copa-uda": 3.7,
    "csac": 1.6,
    "feddg": 3.0,
    "fedadg": 1.3,
    "fedsr": 1.2,
    "fedl2r": 1.2,
    "fedcmi": 1.2,
    "kd3a": 2.3,
    "shot": 1.5,
    "fada": 2.7,
}
"""How many times as long a picture takes in other methods."""

AT_HOME = {
    "fed-dan": 8.0,
    "fed-dann": 8.0,
    "fed-mcd": 17.0,
    "cent-mcd": 14.0,
    "dualadapt": 3.0,
    "fed-oracle": 6.0,
}
"""The same for a picture of the home, which four clients may have copies of."""

TRAINING_PICTURES = {"digits": 800, "rotated-digits": 1000, "streets": 200}
SITES = {"digits": 4, "rotated-digits": 5, "streets": 4}


def seconds_of(jobs: Iterable[Job]) -> float:
    """Of all of them one after the other, on built-in data."""
    return sum(_seconds(job) for job in jobs)


def _seconds(job: Job) -> float:
    config = job.config
    dataset = config.dataset or "digits"
    pictures = min(config.train_per_site or TRAINING_PICTURES[dataset], TRAINING_PICTURES[dataset])
    rounds, hyper = config.rounds or 20, config.hyper
    epochs: float = rounds * (config.local_epochs or 1.0)
    if config.method == "csac":
        epochs = hyper["acquisition_epochs"] + rounds * hyper["calibration_epochs"]
    if config.home:
        seen = pictures * (epochs * AT_HOME.get(config.method, 1.0) + hyper.get("pretrain_epochs", 0.0))
    else:
        sites = len(config.sources) if config.sources else SITES[dataset]
        seen = pictures * epochs * sites * TIMES.get(config.method, 1.0)
    return float(START + A_ROUND * rounds + seen * MILLISECONDS[config.arch, config.image_size] / 1000)


def in_words(seconds: float) -> str:
    minutes = max(1, math.ceil(seconds / 60))
    return "about a minute" if minutes == 1 else f"about {minutes} minutes"
