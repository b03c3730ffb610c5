"""Images can be rebuilt from what a site sends after a batch, and much less from what it sends after an epoch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fedshift.audit.leakage.fig5 import Leakage, Message, leakage
from fedshift.errors import InputError
from fedshift.functional.inversion import Search

STEP, BATCH, EPOCH = Message(1, 1), Message(2, 2), Message(8, 2)


@pytest.fixture(scope="module")
def soft_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Soft blobs in colour, 16 pixels a side, at two sites; which side they are on is their class."""
    root = tmp_path_factory.mktemp("soft")
    rows, columns = np.mgrid[0:16, 0:16]
    for number, name in enumerate(("east", "west")):
        rng = np.random.default_rng(number)
        centres = rng.uniform(3, 13, (40, 3, 2, 1, 1))
        blobs = np.exp(-((rows - centres[:, :, 0]) ** 2 + (columns - centres[:, :, 1]) ** 2) / 18)
        images = (255 * blobs.transpose(0, 2, 3, 1)).astype(np.uint8)
        labels = (centres[:, 0, 1, 0, 0] > 8).astype(np.int64)
        np.savez(
            root / f"{name}.npz",
            train_images=images[:36],
            train_labels=labels[:36],
            test_images=images[36:],
            test_labels=labels[36:],
        )
    return root


@pytest.fixture(scope="module")
def found(soft_data: Path) -> Leakage:
    return leakage("east", messages=(STEP, BATCH, EPOCH), trials=2, search=Search(steps=100), data_dir=soft_data)


@pytest.mark.slow
def test_a_single_step_gives_its_image_away_and_an_epoch_much_less(found: Leakage) -> None:
    step, batch, epoch = found.summary()
    assert step["psnr_mean"] > 25 and step["labels_right"] == 1
    assert batch["psnr_mean"] > epoch["psnr_mean"] + 3
    assert step["psnr_of_plain_grey"] < 10 and epoch["psnr_mean"] < 15
    assert (step["steps"], batch["steps"], epoch["steps"]) == (1, 1, 4)


@pytest.mark.slow
def test_summary_is_the_mean_and_spread_of_its_images(found: Leakage) -> None:
    epoch = found.summary()[2]
    assert len(epoch["psnr"]) == 16
    assert epoch["psnr_mean"] == pytest.approx(np.mean(epoch["psnr"]))
    assert epoch["psnr_std"] == pytest.approx(np.std(epoch["psnr"]))
    rebuilt, original = found.of(EPOCH)[0].rebuilt[0], found.of(EPOCH)[0].originals[0]
    assert epoch["psnr"][0] == pytest.approx(-10 * np.log10(float(((rebuilt - original) ** 2).mean())), rel=1e-4)
    json.dumps(found.plain())


@pytest.mark.slow
def test_originals_are_the_sites_own_and_no_trial_sees_anothers(found: Leakage, soft_data: Path) -> None:
    with np.load(soft_data / "east.npz") as file:
        own = {image.tobytes() for image in file["train_images"]}
    shown = [
        (image.permute(1, 2, 0) * 255).round().to(torch.uint8).numpy().tobytes()
        for attacked in found.of(EPOCH)
        for image in attacked.originals
    ]
    assert set(shown) <= own and len(set(shown)) == 16


@pytest.mark.slow
def test_noise_on_what_leaves_takes_the_image_away(soft_data: Path) -> None:
    search = Search(steps=60)
    plain, noisy = (
        leakage("east", messages=[STEP], trials=1, search=search, noise=noise, data_dir=soft_data).summary()[0]
        for noise in (0.0, 0.01)
    )
    assert noisy["psnr_mean"] < plain["psnr_mean"] - 10


@pytest.mark.slow
def test_the_same_seed_rebuilds_the_same_images(soft_data: Path) -> None:
    one, two = (
        leakage("west", messages=[BATCH], trials=1, search=Search(steps=5), data_dir=soft_data) for _ in range(2)
    )
    assert torch.equal(one.reconstructions[0].rebuilt, two.reconstructions[0].rebuilt)


def test_what_cannot_be_attacked_is_said(soft_data: Path) -> None:
    with pytest.raises(InputError, match=r"no domain 'easst'\. Did you mean 'east'"):
        leakage("easst", data_dir=soft_data)
    with pytest.raises(InputError, match="must be 1 or more"):
        leakage("east", trials=0, data_dir=soft_data)
    with pytest.raises(InputError, match="takes 100 in each of 2 trials"):
        leakage("east", messages=[Message(100, 10)], trials=2, data_dir=soft_data)
