"""Time of an epoch of CSAC's calibration, relative to FedAvg on the same network, images and batches.

Run: python benchmarks/csac_epoch.py [--epochs 10] [--repeats 3] [--only digits-csac]

Both steps are run as a site runs them, in turn, on one thread; seconds are those of the processor, which other work on
the machine disturbs least. The whole step counts: building networks, reading the site's store, writing it back.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedshift.data.domain import DataSource, Domain, Split
from fedshift.federation.plan import ModelSpec, Plan, Training
from fedshift.federation.site import Labelled, SiteSpec
from fedshift.methods import averaging, csac
from fedshift.methods.local import plain_network, weights_of
from fedshift.rng import Rng

LIMIT = 1.5
CLASSES = tuple("0123456789")


@dataclasses.dataclass(frozen=True)
class Case:
    arch: str
    side: int
    batch: int
    samples: int


CASES = (
    Case("digits-csac", side=28, batch=64, samples=256),
    Case("digits-copa", side=32, batch=64, samples=192),
    Case("resnet18", side=64, batch=32, samples=64),
)


def make_site(case: Case, epochs: float, hyper: csac.Hyper, folder: Path) -> Labelled:
    """A site with random images: their content does not affect the time."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (case.samples, case.side, case.side, 3), dtype=np.uint8)
    split = Split(images, rng.integers(0, len(CLASSES), case.samples))
    training = Training(
        rounds=1,
        batch_size=case.batch,
        lr=1e-4,
        lr_min=0.0,
        momentum=0.5,
        weight_decay=0.0,
        local_epochs=epochs,
        schedule="constant",
        precision="float32",
        augment=(),
    )
    plan = Plan(
        version="benchmark",
        method="csac",
        setting="generalize",
        sources=("site",),
        seed=0,
        threads=1,
        model=ModelSpec(case.arch, "classification", CLASSES, (3, case.side, case.side)),
        training=training,
        hyper=dataclasses.asdict(hyper),
    )
    spec = SiteSpec("site", "labelled", DataSource(), ("site",), folder)
    return Labelled(spec, plan, Domain("site", split, split, split), CLASSES, 1)


def measure(case: Case, epochs: float, repeats: int, **keys: Any) -> tuple[float, list[float]]:
    """Seconds of a FedAvg epoch, and the ratio of a calibration epoch to it, per repeat."""
    hyper = csac.Hyper(acquisition_epochs=0.1, calibration_epochs=epochs, **keys)
    with tempfile.TemporaryDirectory() as folder:
        site = make_site(case, epochs, hyper, Path(folder))
        model = weights_of(plain_network(site.plan))
        csac.acquire.run(site, model=model, rng=Rng.of("acquire"))
        plain, ratios = [], []
        for repeat in range(repeats):
            plain.append(_seconds(lambda r=repeat: averaging.train.run(site, model=model, rng=Rng.of("fedavg", r))))
            aligned = _seconds(lambda r=repeat: csac.calibrate.run(site, model=model, rng=Rng.of("csac", r)))
            ratios.append(aligned / plain[-1])
    return statistics.median(plain) / epochs, ratios


def _seconds(work: Callable[[], Any]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=float, default=10, help="epochs per step, for both methods")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="one architecture")
    parser.add_argument("--channels", type=int, default=None, help="csac.channels")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"| network | pixels | batch | FedAvg epoch, s / 1,000 images | CSAC / FedAvg | at most {LIMIT} |")
    print("|---|---|---|---|---|---|")
    for case in CASES:
        if arguments.only in ("", case.arch):
            plain, ratios = measure(case, arguments.epochs, arguments.repeats, channels=arguments.channels)
            middle = statistics.median(ratios)
            print(
                f"| {case.arch} | {case.side} | {case.batch} | {1000 * plain / case.samples:.2f} |"
                f" {middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f}) | {'yes' if middle <= LIMIT else 'no'} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
