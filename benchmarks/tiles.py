"""What squares at the pictures' own resolution bring over shrunk pictures: IoU by class of the predicted masks, both
measured at the pictures' own size, after the same number of training steps.

Run: python benchmarks/tiles.py FOLDER --target SITE [--side 64] [--rounds 4] [--per-site 60] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedshift
from fedshift.data import DataSource, open_dataset
from fedshift.data.batches import LabelledData
from fedshift.functional.metrics import confusion_matrix
from fedshift.functional.tiles import grid
from fedshift.runs.predict import likeliest


def measured(run: fedshift.Run, folder: str, dataset: str | None, target: str, side: int) -> torch.Tensor:
    """The confusion of whole pictures of the target at their own size."""
    site = open_dataset(DataSource(dataset, Path(folder), tile=side)).load(target)
    is_tiled = run.model().header.tiled
    classes = len(run.results["classes"])
    total = torch.zeros(classes, classes, dtype=torch.int64)
    _, height, width = run.model().header.input_shape
    for split in (site.train, site.val, site.test):
        for picture, mask in LabelledData(split, torch.device("cpu")).pictures() or ():
            if is_tiled:
                found = torch.from_numpy(run.predict(picture.numpy()[None])[0])
            else:
                from PIL import Image

                small = Image.fromarray(picture.numpy()).resize((width, height), Image.Resampling.BILINEAR)
                shares = torch.from_numpy(run.predict_proba(np.array(small)[None])[0])
                found = torch.from_numpy(likeliest(shares, (mask.shape[0], mask.shape[1])))
            total += confusion_matrix(found.long(), mask.long(), classes)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--dataset", default=None)
    parser.add_argument("--target", required=True)
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--per-site", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arch", default="unet-small")
    parser.add_argument("--only", choices=["squares", "shrunk"], default=None)
    given = parser.parse_args()
    data = open_dataset(DataSource(given.dataset, Path(given.folder), tile=given.side))
    source = next(name for name in data.domains if name != given.target)
    tiles = data.load(source).train.tiles
    assert tiles is not None
    per_picture = len(grid(*(int(length) for length in tiles.sizes[0]), given.side))
    # A shrunk picture is one square's worth of pixels, so it is passed through as often as a picture has squares.
    ways: dict[str, dict[str, Any]] = {
        "squares": {"tile": given.side},
        "shrunk": {"image_size": given.side, "local_epochs": float(per_picture)},
    }
    for name, keys in ways.items():
        if given.only not in (None, name):
            continue
        started = time.process_time()
        with tempfile.TemporaryDirectory() as out:
            run = fedshift.fit(
                "fedavg",
                out=Path(out) / "run",
                dataset=given.dataset,
                data_dir=given.folder,
                target=given.target,
                arch=given.arch,
                rounds=given.rounds,
                seed=given.seed,
                train_per_site=given.per_site,
                workers=0,
                batch_size=16,
                evaluate_every=given.rounds,
                augment=["flip"],
                **keys,
            )
            total = measured(run, given.folder, given.dataset, given.target, given.side)
        own = total.diagonal()
        iou = own / (total.sum(0) + total.sum(1) - own).clamp(min=1)
        by_class = dict(zip(run.results["classes"], (100 * iou).round(decimals=1).tolist(), strict=True))
        seconds = round(time.process_time() - started)
        print(json.dumps({"way": name, "arch": given.arch, "miou": round(100 * float(iou.mean()), 1), "iou": by_class}))
        print(f"{name}: {seconds} CPU seconds, {per_picture} squares per picture", flush=True)


if __name__ == "__main__":
    main()
