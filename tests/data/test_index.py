"""One index for a data set: folders are listed once, files are fingerprinted once and remembered."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datafiles import picture, save, write_classes

from fedshift.data import DataSource, check_data, open_dataset
from fedshift.data.index import files
from fedshift.data.index.files import FileIndex, Fingerprint


def image_facts(folder: Path, paths: list[Path]) -> list[Fingerprint]:
    return FileIndex().fingerprints(folder, paths, "domain")


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files whose bytes were read."""
    seen: list[Path] = []
    read = files.read_limited

    def spy(path: Path) -> bytes:
        seen.append(path)
        return read(path)

    monkeypatch.setattr(files, "read_limited", spy)
    return seen


def pass_time(monkeypatch: pytest.MonkeyPatch, seconds: float = 10) -> None:
    now = time.time_ns
    monkeypatch.setattr(files.time, "time_ns", lambda: now() + int(seconds * 1e9))


def test_unchanged_files_are_read_once(tmp_path: Path, looked_at: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [save(tmp_path / "a" / f"{i}.png", picture(i, 4, 5)) for i in range(3)]
    pass_time(monkeypatch)
    first = image_facts(tmp_path / "a", paths)
    assert [fact.size for fact in first] == [(4, 5)] * 3
    assert len({fact.digest for fact in first}) == 3
    assert image_facts(tmp_path / "a", paths) == first
    assert sorted(looked_at) == paths


def test_file_changed_a_moment_ago_is_not_trusted(tmp_path: Path, looked_at: list[Path]) -> None:
    path = save(tmp_path / "a.png", picture(1))
    image_facts(tmp_path, [path])
    image_facts(tmp_path, [path])
    assert looked_at == [path, path]


def test_same_size_and_restored_time_do_not_hide_new_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"one")
    pass_time(monkeypatch)
    before = FileIndex().digest(path)
    status = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_mtime_ns == status.st_mtime_ns
    assert FileIndex().digest(path) != before


def test_unreadable_files_have_a_reason_and_are_no_exception(tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"not an image")
    facts = image_facts(tmp_path, [broken, tmp_path / "gone.png"])
    assert facts[0].problem == "it is not a JPEG, PNG, TIFF, GIF, WebP, BMP or DICOM image"
    assert facts[0].digest != ""
    assert facts[1].problem == "No such file or directory"
    assert facts[1].size is None


def test_scrambled_memory_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "a" / "a.png", picture(1))
    pass_time(monkeypatch)
    first = image_facts(tmp_path / "a", [path])
    (memory,) = (tmp_path / "cache" / "facts").iterdir()
    memory.write_bytes(b"{")
    assert image_facts(tmp_path / "a", [path]) == first


def write_all_layouts(root: Path) -> None:
    """Class folders in splits, plain class folders with split lists, an npz file."""
    for split, count in (("train", 6), ("test", 3)):
        write_classes(root / "amber" / split, {"cat": count, "dog": count}, seed=len(split))
    write_classes(root / "blue", {"cat": 8, "dog": 8}, seed=5)
    (root / "splits").mkdir()
    lines = [f"blue/{label}/{i:03}.png" for label in ("cat", "dog") for i in range(8)]
    (root / "splits" / "blue_train.txt").write_text("\n".join(lines[:12]))
    (root / "splits" / "blue_test.txt").write_text("\n".join(lines[12:]))
    np.savez(root / "coral.npz", images=np.stack([picture(900 + i) for i in range(12)]), labels=np.arange(12) % 2)
    (root / "classes.txt").write_text("cat\ndog\n")


class Calls:
    """How often each folder below a root was listed, each file stat'ed by its path, each file hashed."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.listed: Counter[str] = Counter()
        self.stats: Counter[str] = Counter()
        self.hashed: Counter[str] = Counter()
        stat = os.stat
        look_at_image, hash_whole_file = files._look_at_image, files._hash_whole_file

        def below(path: object) -> bool:
            return (isinstance(path, str | Path) and str(path).startswith(f"{root}{os.sep}")) or path == root

        def counted_stat(path: Any, *args: Any, **options: Any) -> os.stat_result:
            if below(path):
                self.stats[str(path)] += 1
            return stat(path, *args, **options)

        def counted(names: Counter[str], work: Any) -> Any:
            def do(path: Any = ".") -> Any:
                if below(path):
                    names[str(path)] += 1
                return work(path)

            return do

        monkeypatch.setattr(os, "stat", counted_stat)
        monkeypatch.setattr(os, "scandir", counted(self.listed, os.scandir))
        monkeypatch.setattr(os, "listdir", counted(self.listed, os.listdir))
        monkeypatch.setattr(files, "_look_at_image", counted(self.hashed, look_at_image))
        monkeypatch.setattr(files, "_hash_whole_file", counted(self.hashed, hash_whole_file))

    def are_one_each(self, folders: set[str], data: set[str]) -> None:
        # A folder for split lists is looked for as well, whether it exists or not.
        assert {name: count for name, count in self.listed.items() if name in folders} == dict.fromkeys(folders, 1)
        assert max(self.listed.values()) == 1
        assert self.hashed == dict.fromkeys(data, 1)
        assert {name: count for name, count in self.stats.items() if name in data} == dict.fromkeys(data, 1)


def folders_and_files(root: Path) -> tuple[set[str], set[str]]:
    below = list(root.rglob("*"))
    data = {str(path) for path in below if path.suffix in (".png", ".npz")}
    return {str(root), *(str(path) for path in below if path.is_dir())}, data


def test_opening_and_loading_list_every_folder_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_all_layouts(root)
    folders, data = folders_and_files(root)
    calls = Calls(root, monkeypatch)
    dataset = open_dataset(DataSource(data_dir=root))
    for _ in range(2):
        assert [len(dataset.load(name).train) > 0 for name in dataset.domains] == [True, True, True]
    calls.are_one_each(folders, data)


def test_a_check_lists_every_folder_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_all_layouts(root)
    folders, data = folders_and_files(root)
    calls = Calls(root, monkeypatch)
    assert check_data(DataSource(data_dir=root)).ok
    calls.are_one_each(folders, data)


def test_masks_are_listed_and_fingerprinted_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for domain in ("amber", "blue"):
        for i in range(12):
            save(root / domain / "images" / f"{i}.png", picture(i + len(domain)))
            save(root / domain / "masks" / f"{i}.png", picture(i)[..., 0] % 3)
    folders, data = folders_and_files(root)
    calls = Calls(root, monkeypatch)
    dataset = open_dataset(DataSource(data_dir=root))
    assert [dataset.load(name).train.inputs.ndim for name in dataset.domains] == [4, 4]
    calls.are_one_each(folders, data)


def test_a_public_data_set_lists_every_folder_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i, domain in enumerate(("art_painting", "photo")):
        write_classes(root / "PACS" / domain, {"dog": 6, "horse": 6}, seed=100 * i)
    folders, data = folders_and_files(root)
    calls = Calls(root, monkeypatch)
    dataset = open_dataset(DataSource(name="pacs", data_dir=root))
    for name in dataset.domains:
        dataset.load(name)
    calls.are_one_each(folders, data)


def test_every_opening_looks_at_the_folder_anew(root: Path) -> None:
    write_classes(root / "amber", {"cat": 4, "dog": 4})
    before = open_dataset(DataSource(data_dir=root))
    save(root / "amber" / "emu" / "1.png", picture(77))
    after = open_dataset(DataSource(data_dir=root))
    assert (before.classes, after.classes) == (("cat", "dog"), ("cat", "dog", "emu"))


def test_a_link_to_itself_is_no_data(root: Path) -> None:
    write_classes(root / "amber", {"cat": 4, "dog": 4})
    (root / "loop").symlink_to(root / "loop")
    assert open_dataset(DataSource(data_dir=root)).domains == ("amber",)


def test_domains_that_share_a_folder_are_remembered_side_by_side(
    tmp_path: Path, looked_at: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (save(tmp_path / "all" / f"{i}.png", picture(i)) for i in range(2))
    pass_time(monkeypatch)
    for _ in range(2):
        index = FileIndex()
        index.fingerprints(tmp_path / "all", [first], "one")
        index.fingerprints(tmp_path / "all", [second], "two")
    assert looked_at == [first, second]
