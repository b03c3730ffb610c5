"""A user's own data: a folder with one sub-folder, npz file or table for each domain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fedshift.data import tables
from fedshift.data.arrays import ArraysError, ImageArrays, read_npz
from fedshift.data.imagefiles import ImageFiles
from fedshift.data.listing import Reading, image_files, list_domain, sub_folders
from fedshift.data.raw import Problem, RawDomain, printable
from fedshift.data.survey import Agreed, Survey, check_ids, mask_code, read_class_file, survey_images, survey_tables
from fedshift.errors import InputError

SPLIT_FOLDER = "splits"

LAYOUTS = "fedshift reads <domain>/<class>/*.jpg|png, <domain>/images with <domain>/masks, <domain>.npz or <domain>.csv"


def survey_folder(
    root: Path, image_size: int | None = None, label_column: str | None = None, agreed: Agreed | None = None
) -> Survey:
    """Look at all domains below a folder: those of images if there are any, else tables."""
    if not root.is_dir():
        raise InputError("data-missing", f"There is no folder {printable(root)}.")
    name = printable(root.resolve().name)
    folders = [path for path in sub_folders(root) if path.name.lower() != SPLIT_FOLDER]
    archives = _files(root, (".npz",))
    sheets = _files(root, tables.SUFFIXES)
    has_images = bool(archives) or any(_holds_images(folder) for folder in folders)
    if sheets and not has_images:
        return _survey_sheets(name, sheets, label_column, _ignored(folders, "no images"))
    if not folders and not archives:
        raise InputError("data-layout", f"There are no domains in {printable(root)}; {LAYOUTS}.")
    if label_column is not None:
        raise InputError("config-value", f"label_column is for tables, but {printable(root)} holds images.")
    return _survey_images(name, root, folders, archives, image_size, _ignored(sheets, "the data are images"), agreed)


def read_archive(path: Path, name: str, classes: tuple[str, ...] | None) -> tuple[RawDomain | None, list[Problem]]:
    """The domain in an npz file, or why it cannot be one."""
    try:
        arrays, digest = read_npz(path)
    except ArraysError as problem:
        return None, [Problem("data-unreadable", f"{printable(path)} cannot be read: {problem}.")]
    return ImageArrays(name, arrays, digest, classes), []


def _survey_images(
    name: str,
    root: Path,
    folders: Sequence[Path],
    archives: Sequence[Path],
    image_size: int | None,
    warnings: list[str],
    agreed: Agreed | None,
) -> Survey:
    lines = read_class_file(root)
    domains: list[RawDomain] = []
    problems: list[Problem] = []
    for folder in folders:
        listing = list_domain(folder, [folder.name], [root / SPLIT_FOLDER], Reading())
        domains.append(ImageFiles(folder.name, listing))
    for path in archives:
        domain, found = read_archive(path, path.stem, lines)
        problems += found
        if domain is not None:
            domains.append(domain)
    problems += _name_problems([path.name for path in folders] + [path.stem for path in archives])
    domains.sort(key=lambda domain: domain.name)
    classes, code = lines, None
    if lines is not None and any(domain.task == "segmentation" for domain in domains):
        classes, code = mask_code(lines)
        check_ids(domains, code)
    return survey_images(name, domains, image_size, classes, code, problems, warnings, agreed)


def _survey_sheets(name: str, sheets: Sequence[Path], label_column: str | None, warnings: list[str]) -> Survey:
    problems = _name_problems([path.stem for path in sheets])
    cells: list[tables.Cells] = []
    for path in sheets:
        try:
            cells.append(tables.read_cells(path))
        except tables.TableError as error:
            problems.append(error.problem)
    if not cells:
        return survey_tables(name, [], [], problems, warnings)
    try:
        label = tables.find_label_column(cells, label_column)
    except tables.TableError as error:
        return survey_tables(name, [], [], [*problems, error.problem], warnings)
    columns = [column for column in cells[0].header if column != label]
    domains: list[RawDomain] = []
    for table in cells:
        own = set(table.header) - {label}
        if own == set(columns):
            domains.append(tables.Table(table.path.stem, table, label, columns))
        else:
            only = printable(", ".join(sorted(own ^ set(columns))))
            pair = f"{printable(table.path.name)} and {printable(cells[0].path.name)}"
            problems.append(
                Problem("data-layout", f"{pair} do not have the same columns; only one of them has: {only}.")
            )
    return survey_tables(name, domains, columns, problems, warnings)


def _files(root: Path, suffixes: Sequence[str]) -> list[Path]:
    return sorted(
        path
        for path in root.iterdir()
        if path.suffix.lower() in suffixes and path.is_file() and not path.name.startswith(".")
    )


def _holds_images(folder: Path, depth: int = 3) -> bool:
    return bool(image_files(folder)) or (
        depth > 0 and any(_holds_images(inner, depth - 1) for inner in sub_folders(folder))
    )


def _ignored(paths: Sequence[Path], why: str) -> list[str]:
    return [f"{printable(path.name)} is not read: {why}." for path in paths]


def _name_problems(names: Sequence[str]) -> list[Problem]:
    problems = [
        Problem("data-layout", f"The domain name {printable(name)!r} has unprintable characters; rename it.")
        for name in names
        if not name.isprintable()
    ]
    twice = [name for name, count in Counter(names).items() if count > 1]
    return problems + [
        Problem("data-layout", f"There are several domains called {printable(name)!r}; rename or remove one.")
        for name in twice
    ]
