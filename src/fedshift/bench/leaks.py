"""KD3A, Fig. 5: what can be rebuilt from a message after every batch, and from one after an epoch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedshift.audit.leakage import Leakage, leakage
from fedshift.bench.figures import new_figure, saved
from fedshift.bench.functions import only_seed, options_of, timed
from fedshift.bench.places import named_place
from fedshift.bench.recipes import KD3A_DOMAINNET, RESNET_101
from fedshift.bench.sheets import Sheet, Value
from fedshift.bench.suite import Found, Order
from fedshift.files import write_atomically
from fedshift.functional.inversion import Search
from fedshift.runs.config import apply_settings

SHOWN = 6
"""Images in a row of the picture."""

SMALL_SIDE = 32
"""What given folders are scaled to, in pixels, at scale mini."""

COLUMNS = ("PSNR, mean", "PSNR, std", "plain grey", "labels found", "steps", "images")

NOTES = (
    "The attacker knows the network, its weights before the message, the schedule, and how many images were used in"
    " what batches; not the images, their order or their labels. It takes an epoch for one large step: one that replays"
    " the epoch may do better.",
    "PSNR in dB over images, beside that of a plain grey image, which needs no message.",
)


@dataclass(frozen=True)
class Options:
    """`--set leakage.KEY=VALUE`: sites for every message, steps of the attacker's search, and how often it starts."""

    trials: int = 4
    steps: int = 300
    starts: int = 1


def fig5(order: Order) -> Found:
    """DIFFERS: the paper shows two pictures and states neither network, images nor search; scale paper takes its
    largest data set and the network it uses there."""
    seed = only_seed(order, "kd3a/fig5", "leakage.trials")
    site, keys, usual = _choice(order)
    options, keys = options_of("leakage", usual, apply_settings(keys, order.settings))
    search = Search(options.steps, starts=options.starts)
    found = leakage(site, trials=options.trials, search=search, seed=seed, tell=timed(order.tell), **keys)
    files = write_leakage(found, order.out)
    note = f"{found.dataset}, site {found.site}, {found.arch} before round 1, {search.steps} steps a search."
    return Found(sheets=(sheet(found),), files=tuple(files), notes=(note, *NOTES))


def _choice(order: Order) -> tuple[str | None, dict[str, Any], Options]:
    """Whose images, configuration keys, and how hard the attacker tries."""
    if order.scale == "paper":
        place = named_place(KD3A_DOMAINNET, order.data_dir)
        return place.scene.domains[0], {**RESNET_101, "weights": None, **place.data}, Options(steps=4800)
    if order.data_dir is not None:
        return None, {"data_dir": str(order.data_dir), "image_size": SMALL_SIDE}, Options()
    return "photo", {"dataset": "digits"}, Options()


def sheet(found: Leakage) -> Sheet:
    rows: dict[str, list[Value]] = {
        row["message"]: [
            row["psnr_mean"],
            row["psnr_std"],
            row["psnr_of_plain_grey"],
            row["labels_right"],
            row["steps"],
            len(row["psnr"]),
        ]
        for row in found.summary()
    }
    return Sheet("images rebuilt from a message", COLUMNS, rows)


def write_leakage(found: Leakage, out: Path) -> list[Path]:
    """leakage.png, originals above what was rebuilt of them, and leakage.json beside it; returns the picture."""
    figure, axes = new_figure(1, rows=len(found.messages))
    figure.set_size_inches(SHOWN * 1.1 + 1.0, len(found.messages) * 2.7)
    for axis, message, row in zip(axes, found.messages, found.summary(), strict=True):
        own = found.of(message)
        originals = torch.cat([attacked.originals for attacked in own])[:SHOWN]
        rebuilt = torch.cat([attacked.rebuilt for attacked in own])[:SHOWN]
        axis.imshow(torch.cat([_strip(originals), _strip(rebuilt)], dim=0).numpy(), interpolation="nearest")
        axis.set_title(f"{message.name}: {row['psnr_mean']:.1f} ± {row['psnr_std']:.1f} dB", fontsize="medium")
        side = originals.shape[2]
        axis.set_yticks([side / 2, side * 1.5 + 2], ["original", "rebuilt"])
        axis.set_xticks([])
    write_atomically(out / "leakage.json", (json.dumps(found.plain(), indent=2) + "\n").encode())
    return [saved(figure, out / "leakage.png")]


def _strip(images: Tensor) -> Tensor:
    """Images side by side on white, as many places as are shown: `(height + 2, width of all, 3)`."""
    count, _, height, width = images.shape
    strip = torch.ones(height + 2, SHOWN * (width + 2), 3)
    for number in range(count):
        left = number * (width + 2)
        strip[:height, left : left + width] = images[number].permute(1, 2, 0)
    return strip
