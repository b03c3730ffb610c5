"""A folder without labels is readable once others have said what the classes are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedshift.data import DataSource, open_dataset
from fedshift.data.domain import Task
from fedshift.errors import InputError
from fedshift.federation.site import SiteSpec
from fedshift.federation.survey import look


@pytest.fixture
def unlabelled(tmp_path: Path) -> Path:
    folder = tmp_path / "data" / "north"
    folder.mkdir(parents=True)
    for number in range(12):
        pixels = np.random.default_rng(number).integers(0, 256, (20, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path / "data"


def test_alone_it_cannot_be_opened(unlabelled: Path) -> None:
    with pytest.raises(InputError, match="has labels"):
        open_dataset(DataSource(data_dir=unlabelled))


@pytest.mark.parametrize("task", ["classification", "segmentation"])
def test_with_agreed_classes_it_has_inputs_and_no_labels(unlabelled: Path, task: Task) -> None:
    dataset = open_dataset(DataSource(data_dir=unlabelled, task=task, classes=("cat", "dog")))
    domain = dataset.load("north")
    assert dataset.classes == ("cat", "dog") and dataset.task == task and dataset.input_shape == (3, 20, 30)
    assert domain.train.labels is None and len(domain.train) + len(domain.val) + len(domain.test) == 12


def test_labels_of_its_own_come_before_what_is_agreed(unlabelled: Path) -> None:
    for number, name in enumerate(("cow", "dog")):
        (unlabelled / "south" / name).mkdir(parents=True)
        for picture in range(6):
            pixels = np.full((20, 30, 3), 20 * picture + number, dtype=np.uint8)
            Image.fromarray(pixels).save(unlabelled / "south" / name / f"{picture}.png")
    dataset = open_dataset(DataSource(data_dir=unlabelled, task="classification", classes=("cat", "dog")))
    assert dataset.classes == ("cow", "dog")


def test_a_site_without_labels_leaves_the_classes_open(unlabelled: Path) -> None:
    found = look(SiteSpec("north", "held-out", DataSource(data_dir=unlabelled), ("north",), Path()))
    assert found.task is None and found.classes == () and found.input_shape == ()
    with pytest.raises(InputError, match="no part called 'south'"):
        look(SiteSpec("south", "held-out", DataSource(data_dir=unlabelled), ("south",), Path()))
