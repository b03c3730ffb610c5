"""Data that are not fit for the parts they play end a run before it begins, and leave no folder behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from listening import Heard
from PIL import Image
from tinydata import shapes, write_domain
from typer.testing import CliRunner

import fedshift
from fedshift.cli.app import app
from fedshift.data import DataSource, check_data
from fedshift.errors import InputError
from fedshift.runs.card import skipped_throughout

QUICK: dict[str, Any] = {"rounds": 2, "workers": 0, "batch_size": 16, "arch": "digits-csac"}


def picture(path: Path, value: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (16, 16), (value, 0, 255 - value)).save(path)


def write_folders(root: Path) -> None:
    """Two sites with class folders, and one whose pictures lie flat."""
    for number in range(14):
        for label in ("a", "b"):
            for site in ("north", "south"):
                picture(root / site / label / f"{label}{number}.png", 9 * number + 2 * len(site))
        picture(root / "flat" / f"{number}.png", 17 * number)


def write_masks(root: Path) -> None:
    for number in range(14):
        ids = np.full((16, 16), number % 2, dtype=np.uint8)
        ids[:4] = 1
        for site in ("north", "south", "flat"):
            picture(root / site / "images" / f"{number}.png", 9 * number + len(site))
            if site != "flat":
                mask = root / site / "masks" / f"{number}.png"
                mask.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(ids).save(mask)


def write_arrays(root: Path) -> None:
    root.mkdir()
    for seed, site in enumerate(("north", "south")):
        write_domain(root, site, seed=seed)
    images, _ = shapes(40, (1.0, 1.0, 1.0), 0.1, 5)
    np.savez(root / "flat.npz", train_images=images[:30], test_images=images[30:])


def write_tables(root: Path) -> None:
    root.mkdir()
    rng = np.random.default_rng(0)
    for site in ("north", "south", "flat"):
        rows = [f"{x:.3f},{y:.3f}" + ("" if site == "flat" else f",{int(x > 0)}") for x, y in rng.normal(size=(60, 2))]
        head = "p,q" if site == "flat" else "p,q,label"
        (root / f"{site}.csv").write_text("\n".join([head, *rows]) + "\n")


KINDS = {
    "folders": (write_folders, "its images are not in class folders (flat/CLASS/*.png)"),
    "masks": (write_masks, "there is no mask for its training images (flat/masks beside flat/images)"),
    "arrays": (write_arrays, "flat.npz has no array train_labels (or labels)"),
    "tables": (write_tables, "its table has no label column"),
}


def refused(root: Path, out: Path, method: str = "fedavg", **keys: Any) -> InputError:
    """The error that ends a run; nothing was begun."""
    with pytest.raises(InputError) as caught:
        fedshift.fit(method, data_dir=root, out=out, rounds=1, workers=0, **keys)
    assert caught.value.exit_code == 2 and not out.exists()
    return caught.value


@pytest.mark.parametrize("kind", KINDS)
def test_a_home_without_labels_is_named_and_leaves_no_folder(tmp_path: Path, kind: str) -> None:
    write, lacks = KINDS[kind]
    write(tmp_path / "data")
    error = refused(tmp_path / "data", tmp_path / "run", home="flat")
    assert error.code == "method-needs" and "leave it out" not in error.message
    assert error.message == (
        f"the home 'flat' has no labels to train on: {lacks}. Add them, or choose another --home"
        " (north, south have labels)"
    )


@pytest.mark.parametrize("method", ["fedavg", "deepall"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_source_without_labels_is_named_and_leaves_no_folder(tmp_path: Path, kind: str, method: str) -> None:
    """Also one of several that are pooled."""
    write, lacks = KINDS[kind]
    write(tmp_path / "data")
    error = refused(tmp_path / "data", tmp_path / "run", method, target="south")
    assert error.code == "method-needs"
    assert error.message.startswith(f"source 'flat' has no labels to train on: {lacks}. Add them, or leave it out")


def test_a_target_whose_labels_are_needed_is_named(tmp_path: Path) -> None:
    write_folders(tmp_path / "data")
    error = refused(tmp_path / "data", tmp_path / "run", "oracle", target="flat")
    assert "target 'flat' has no labels to train on" in error.message and "oracle learns from" in error.message


def test_after_the_home_is_repaired_the_same_command_runs(tmp_path: Path) -> None:
    root, out = tmp_path / "data", tmp_path / "run"
    write_arrays(root)
    refused(root, out, home="flat", arch="digits-csac")
    write_domain(root, "flat", seed=5)
    fedshift.fit("fedavg", data_dir=root, out=out, rounds=1, workers=0, home="flat", arch="digits-csac")
    assert (out / "done").exists()


def test_sites_without_training_data_leave_no_folder(tmp_path: Path) -> None:
    for name in ("amber", "blue", "coral"):
        (tmp_path / "data").mkdir(exist_ok=True)
        write_domain(tmp_path / "data", name, train=0 if name == "blue" else 40)
    keys: dict[str, Any]
    for keys in ({"target": "coral"}, {"target": "blue", "setting": "adapt"}, {"home": "blue"}):
        assert refused(tmp_path / "data", tmp_path / "run", **keys).code == "data-empty"


@pytest.fixture
def uneven(tmp_path: Path) -> Path:
    """`east` has 7 training samples, the others have more than enough."""
    root = tmp_path / "data"
    root.mkdir()
    for seed, name in enumerate(("amber", "blue", "coral", "east")):
        # A tenth of what is for training becomes validation.
        write_domain(root, name, train=8 if name == "east" else 60, test=15, seed=seed)
    return root


def told_of(heard: Heard, site: str) -> list[str]:
    return [text for text in heard.messages if text.startswith(f"warning: {site!r} has")]


@pytest.mark.parametrize("method", ["dualadapt", "fed-dan"])
def test_a_client_that_its_policy_keeps_out_is_told_before_round_1(uneven: Path, method: str) -> None:
    heard = Heard()
    own = {"dualadapt": {"pretrain_epochs": 1, "points": 64}} if method == "dualadapt" else {}
    run = fedshift.fit(method, data_dir=uneven, home="amber", progress=heard, **QUICK, **own)
    size = run.results["samples"]["east"]["train"]
    (warning,) = told_of(heard, "east")
    assert warning == (
        f"warning: 'east' has {size} training samples, but policy.min_samples asks for 10 before anything learned from"
        " them may leave a site. It is skipped in every round and scored with what was learned without it: add data, or"
        " lower policy.min_samples"
    )
    assert heard.messages.index(warning) < next(i for i, text in enumerate(heard.messages) if "round 1:" in text)
    assert run.results["counters"]["skipped.east.site-policy"] == 2 and skipped_throughout(run.results) == ["east"]
    rows = {line.split()[0]: line for line in run.table().splitlines()}
    assert rows["east"].endswith("skipped in every round: learned without it") and "skipped" not in rows["blue"]
    card = run.directory.card.read_text()
    assert "| east (skipped) | 15 |" in card and "| blue | 15 |" in card


def test_a_client_without_labels_is_not_said_to_be_scored(uneven: Path) -> None:
    images, _ = shapes(12, (1.0, 1.0, 1.0), 0.1, 5)
    np.savez(uneven / "east.npz", train_images=images[:6], test_images=images[6:])
    heard = Heard()
    run = fedshift.fit("fed-dan", data_dir=uneven, home="amber", progress=heard, **QUICK)
    (warning,) = told_of(heard, "east")
    assert "It is skipped in every round: add data" in warning and "east" not in run.results["per_target"]


def test_clients_that_nobody_asks_to_learn_are_not_warned_of(uneven: Path) -> None:
    heard = Heard()
    run = fedshift.fit("fedavg", data_dir=uneven, home="amber", progress=heard, **QUICK)
    assert not told_of(heard, "east") and skipped_throughout(run.results) == []


def test_a_source_that_its_policy_keeps_out_is_told_while_the_quorum_holds(uneven: Path) -> None:
    heard = Heard()
    run = fedshift.fit("fedavg", data_dir=uneven, target="amber", progress=heard, **QUICK)
    (warning,) = told_of(heard, "east")
    assert "It is skipped in every round: add data" in warning
    assert run.results["counters"]["failed.site-policy"] == 2


def test_a_source_that_never_trains_alone_has_no_say_in_the_mean(uneven: Path) -> None:
    run = fedshift.fit("single-site", data_dir=uneven, target="amber", **QUICK)
    assert sorted(run.model().models) == ["blue", "coral"]
    without = fedshift.fit("single-site", data_dir=uneven, target="amber", sources=["blue", "coral"], **QUICK)
    assert run.results["per_target"] == without.results["per_target"]
    assert run.results["counters"]["skipped.east.site-policy"] == 2


def test_a_client_that_never_trains_with_its_labels_is_marked(uneven: Path) -> None:
    run = fedshift.fit("oracle", data_dir=uneven, home="amber", **QUICK)
    assert sorted(run.model().models) == ["blue", "coral"] and skipped_throughout(run.results) == ["east"]
    own = np.load(uneven / "east.npz")
    scores = [run.score(own["test_images"], own["test_labels"], site=name) for name in ("blue", "coral")]
    assert run.results["per_target"]["east"]["last"] == pytest.approx(sum(scores) / 2)


@pytest.mark.parametrize(
    ("method", "keys", "told"),
    [
        ("fedavg", {"target": "amber", "sources": ["east"]}, "nobody would be left to learn from: 'east' has"),
        ("fedavg", {"home": "east"}, "nobody would be left to learn from: 'east' has"),
        ("dualadapt", {"home": "amber", "targets": ["east"]}, "nobody would be left to learn from: 'east' has"),
        ("fedavg", {"target": "amber", "quorum": 1.0}, "2 of 3 sites would be left to learn from and the quorum asks"),
        ("sequential", {"target": "amber"}, "sequential needs every site: 'east' has"),
        ("oracle", {"target": "east"}, "nobody would be left to learn from: 'east' has"),
    ],
)
def test_a_run_that_could_not_go_on_is_refused(
    uneven: Path, tmp_path: Path, method: str, keys: dict[str, Any], told: str
) -> None:
    error = refused(uneven, tmp_path / "run", method, **keys)
    assert error.code == "site-policy" and error.message.startswith(told)
    assert "policy.min_samples asks for 10" in error.message and "site.log" not in error.message


def test_a_home_whose_data_do_not_leave_it_may_be_small(uneven: Path) -> None:
    keys = {"home": "east", "targets": ["amber"], "dualadapt": {"pretrain_epochs": 1, "mixtures": False}}
    assert fedshift.fit("dualadapt", data_dir=uneven, **QUICK, **keys).results["counters"] == {}


def test_keys_that_cut_the_data_are_named(tiny_data: Path, tmp_path: Path) -> None:
    error = refused(tiny_data, tmp_path / "run", target="dim", train_per_site=4)
    assert "'amber' has 4 training samples (of 61, by train_per_site)" in error.message
    assert "add data, raise train_per_site, or lower policy.min_samples" in error.message
    error = refused(tiny_data, tmp_path / "run", "fed-dan", home="dim", client_fraction=0.1)
    assert "'amber' has 6 training samples (of 61, by client_fraction)" in error.message


def test_data_that_come_with_fedshift_are_counted_where_settings_leave_little(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"'\w+' has 3 training samples \(of [\d,]+, by train_per_site\)"):
        fedshift.fit("fedavg", dataset="rotated-digits", target="M0", train_per_site=3, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_table_marks_clients_that_were_skipped(uneven: Path, tmp_path: Path) -> None:
    keys = [word for key, value in QUICK.items() for word in ("--set", f"{key}={value}")]
    command = ["train", "--method", "fed-dan", "--home", "amber", "--data-dir", str(uneven), *keys]
    shown = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "run")], env={"COLUMNS": "200"})
    assert shown.exit_code == 0 and "east (skipped)" in shown.output and "blue (skipped" not in shown.output
    assert "east was skipped in every round: its score is of a model that learned without it" in shown.output


@pytest.mark.parametrize("kind", KINDS)
def test_the_check_warns_of_domains_without_labels(tmp_path: Path, kind: str) -> None:
    KINDS[kind][0](tmp_path / "data")
    report = check_data(DataSource(data_dir=tmp_path / "data"))
    what = "masks" if kind == "masks" else "labels"
    warning = f"flat has no {what} to train on: it can only be a target or client, no source or home."
    assert report.ok and [text for text in report.warnings if "to train on" in text] == [warning]


def test_the_check_warns_of_domains_with_few_training_samples(uneven: Path) -> None:
    report = check_data(DataSource(data_dir=uneven))
    (few,) = (domain for domain in report.domains if domain.name == "east")
    (warning,) = (text for text in report.warnings if "policy.min_samples" in text)
    assert report.ok and warning.startswith(f"east has {few.splits['train']} training samples, and policy.min_samples")
