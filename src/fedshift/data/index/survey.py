"""What the domains of a data set agree on before any of them is read: task, classes, size, columns.

All sites must number the classes in the same way, also a site without samples of some class, so the class list belongs
to the data set and not to a domain. It is `classes.txt` (one name per line), or else the union of what the labelled
domains have: in alphabetical order, or in the order of the numbers if all names are numbers.

A user's own folder has one sub-folder, npz file or table for each domain.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedshift.data.decoding import DEFAULT_SIZE, common_size, fit_of
from fedshift.data.domain import Dataset, Domain, Task
from fedshift.data.formats import tables
from fedshift.data.formats.arrays import ArraysError, ImageArrays, read_npz
from fedshift.data.formats.base import (
    CLASS_FILE,
    InputFormat,
    Problem,
    Progress,
    RawDomain,
    Unread,
    printable,
    refuse_many_skipped,
)
from fedshift.data.formats.columns import COLUMN_FILE, ColumnRules, features_of_columns, read_rules
from fedshift.data.formats.images import ImageFiles
from fedshift.data.formats.masks import MaskCode, found_classes, listed_classes, unlisted_ids
from fedshift.data.index.files import FileIndex
from fedshift.data.index.layouts import Reading, find_unread, list_domain, plain_name
from fedshift.errors import InputError, nearest

SPLIT_FOLDER = "splits"

LAYOUTS = (
    "fedshift reads pictures in <domain>/<class>/, <domain>/images with <domain>/masks, <domain>.npz or <domain>.csv"
)


@dataclass(frozen=True)
class Survey:
    """All that is known of a data set without reading it. With problems, it cannot be opened. `shown_in`: see
    `Dataset`."""

    name: str
    task: Task
    form: InputFormat
    domains: tuple[RawDomain, ...]
    input_shape: tuple[int, ...]
    problems: tuple[Problem, ...]
    warnings: tuple[str, ...]
    columns: tuple[str, ...] = ()
    shown_in: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    has_class_file: bool = False
    """Whether the class list was written down, and not found in the data."""
    text_columns: tuple[str, ...] = ()
    """Columns of tables whose categories nobody listed: they were found in the data."""


@dataclass(frozen=True)
class Agreed:
    """What the sites of a federation agreed on, for data that have no labels."""

    task: Task
    classes: tuple[str, ...]


def survey_folder(
    root: Path, image_size: int | None = None, label_column: str | None = None, agreed: Agreed | None = None
) -> Survey:
    """All domains below a folder: those of images if there are any, else tables."""
    if not root.is_dir():
        raise InputError("data-missing", f"There is no folder {printable(root)}.")
    name = printable(root.resolve().name)
    index = FileIndex()
    folders = [path for path in index.folders(root) if path.name.lower() != SPLIT_FOLDER]
    archives = index.files(root, (".npz",))
    sheets = index.files(root, tables.SUFFIXES)
    has_images = bool(archives) or any(_holds_images(index, folder) for folder in folders)
    if sheets and not has_images:
        return _survey_sheets(root, name, sheets, label_column, _ignored(folders, "no images"))
    if not folders and not archives:
        raise InputError("data-layout", f"There are no domains in {printable(root)}; {LAYOUTS}.")
    if label_column is not None:
        raise InputError("config-value", f"label_column is for tables, but {printable(root)} holds images.")
    lines = _read_class_file(root, index)
    domains, problems = _image_domains(index, root, folders, archives, lines)
    classes, code = lines, None
    if lines is not None and any(domain.task == "segmentation" for domain in domains):
        classes, code = listed_classes(lines)
        _refuse_unlisted_ids(domains, code)
    ignored = _ignored(sheets, "the data are images") + _stray(index, root, archives, sheets)
    found = survey_images(name, domains, image_size, classes, code, problems, ignored, agreed)
    return replace(found, has_class_file=lines is not None)


def survey_images(
    name: str,
    domains: Sequence[RawDomain],
    wanted_size: int | None,
    classes: tuple[str, ...] | None = None,
    code: MaskCode | None = None,
    problems: Sequence[Problem] = (),
    warnings: Sequence[str] = (),
    agreed: Agreed | None = None,
) -> Survey:
    """Domains of images, with classes or masks. `classes` (for masks, with `code`) fixes the class list; if no domain
    has labels, `agreed` does."""
    found = [*problems, *(problem for domain in domains for problem in domain.problems)]
    remarks = [*warnings, *(warning for domain in domains for warning in domain.warnings)]
    tasks = {domain.task for domain in domains} - {None}
    task: Task = "segmentation" if "segmentation" in tasks else "classification"
    if agreed is not None and not tasks:
        task, classes, code = agreed.task, agreed.classes, MaskCode({})
    if len(tasks) == 2:
        found.append(Problem("data-layout", f"{name} mixes domains with class folders and domains with masks."))
    if domains and not tasks and agreed is None:
        found.append(
            Problem("data-layout", f"No domain of {name} has labels: there are neither class folders nor masks.")
        )
    shown_in: dict[str, dict[str, str]] = {}
    if task == "classification":
        classes = agree_on_classes(name, _class_counts(domains), classes, found, remarks)
    elif code is None or classes is None:
        shown_by = {domain.name: domain.mask_ids() for domain in domains if isinstance(domain, ImageFiles)}
        classes, code, shown_in = found_classes(name, shown_by, found)
    fit = fit_of(task)
    sizes = [domain.sizes() for domain in domains]
    if any(sizes):
        size = common_size(sizes, wanted_size, fit)
    else:
        size = (DEFAULT_SIZE, DEFAULT_SIZE)
        if domains and not found:
            found.append(Problem("data-unreadable", f"No image of {name} can be read."))
    form = InputFormat(classes, size, fit, code if task == "segmentation" else None)
    return Survey(name, task, form, tuple(domains), (3, *size), tuple(found), tuple(remarks), shown_in=shown_in)


def survey_tables(
    name: str,
    domains: Sequence[RawDomain],
    columns: Sequence[str],
    problems: Sequence[Problem] = (),
    warnings: Sequence[str] = (),
) -> Survey:
    """Domains of table rows with the same columns."""
    found = [*problems, *(problem for domain in domains for problem in domain.problems)]
    remarks = list(warnings)
    classes = agree_on_classes(name, _class_counts(domains), None, found, remarks)
    shape, names = (len(columns),), tuple(columns)
    return Survey(
        name, "classification", InputFormat(classes), tuple(domains), shape, tuple(found), tuple(remarks), names
    )


def survey_site(folder: Path, agreed: Agreed, size: tuple[int, int]) -> Survey:
    """One site's folder of pictures for a model that exists: its classes, its size. Labels are optional."""
    index = FileIndex()
    name = printable(folder.resolve().name)
    listing = list_domain(index, folder, [folder.name], [], Reading())
    find_unread(index, listing)
    warnings = [_told(name, unread) for unread in listing.unread]
    found = survey_images(
        name, [ImageFiles(name, listing, index)], min(size), agreed.classes, None, (), warnings, agreed
    )
    form = InputFormat(agreed.classes, size, fit_of(agreed.task))
    return replace(found, form=form, input_shape=(3, *size))


def open_survey(survey: Survey, progress: Progress | None = None) -> Dataset:
    """The data set, or an error with the first of the survey's problems."""
    if survey.problems:
        first, more = survey.problems[0], len(survey.problems) - 1
        hint = f" ({more} more: `fedshift check-data` lists them.)" if more else ""
        raise InputError(first.code, first.message + hint)
    domains = {domain.name: domain for domain in survey.domains}

    def load(name: str) -> Domain:
        if name not in domains:
            raise InputError("unknown-name", f"{survey.name} has no domain {name!r}. {nearest(name, domains)}")
        domain = domains[name].read(survey.form, progress)
        refuse_many_skipped(domain)
        return domain

    return Dataset(
        survey.name,
        survey.task,
        survey.form.classes,
        tuple(domains),
        survey.input_shape,
        load,
        survey.warnings,
        survey.columns,
        survey.shown_in,
        survey.form.code.ids_of(len(survey.form.classes)) if survey.form.code else (),
        survey.form.tile,
        survey.form.scaled_to,
    )


def agree_on_classes(
    name: str,
    counts: Mapping[str, Counter[str]],
    given: tuple[str, ...] | None,
    problems: list[Problem],
    warnings: list[str],
) -> tuple[str, ...]:
    """The class list of labelled domains, from their counts of samples by class; disagreements are added to the
    problems and warnings."""
    total: Counter[str] = Counter()
    for found in counts.values():
        total.update(found)
    classes = given if given is not None else _sorted_names(total)
    unknown = [label for label in total if label not in classes]
    if unknown:
        problems.append(
            Problem("data-classes", f"{name} has samples of {_quoted(unknown)}, which are not in its list of classes.")
        )
    for spellings in _alike(classes):
        where = "; ".join(
            f"{printable(spelling)!r} at {', '.join(site for site, found in counts.items() if spelling in found)}"
            for spelling in spellings
        )
        problems.append(Problem("data-classes", f"Class names that differ only in spelling: {where}. Rename one."))
    nowhere = [label for label in classes if given is None and total[label] == 0]
    if nowhere:
        problems.append(Problem("data-empty", f"No domain of {name} has an image of {_quoted(nowhere)}."))
    if counts and len(classes) < 2:
        problems.append(Problem("data-classes", f"{name} has {len(classes)} class; there must be two or more."))
    if given is None:
        problems += [_nearly(pair, counts) for pair in _near_misses(classes, counts)]
    for site, found in counts.items():
        missing = [label for label in classes if found[label] == 0 and label not in nowhere]
        if missing:
            warnings.append(f"{site} has no sample of {_quoted(missing)}.")
    return classes


def read_archive(
    path: Path, name: str, classes: tuple[str, ...] | None, index: FileIndex
) -> tuple[RawDomain | None, list[Problem]]:
    """The domain in an npz file, or why there is none."""
    try:
        arrays, digest = read_npz(path, index)
    except ArraysError as problem:
        return None, [Problem("data-unreadable", f"{printable(path)} cannot be read: {problem}.")]
    return ImageArrays(name, arrays, digest, classes), []


def _class_counts(domains: Sequence[RawDomain]) -> dict[str, Counter[str]]:
    return {domain.name: found for domain in domains if (found := domain.class_counts()) is not None}


def _image_domains(
    index: FileIndex, root: Path, folders: Sequence[Path], archives: Sequence[Path], lines: tuple[str, ...] | None
) -> tuple[list[RawDomain], list[Problem]]:
    domains: list[RawDomain] = []
    problems: list[Problem] = []
    for folder in folders:
        listing = list_domain(index, folder, [folder.name], [root / SPLIT_FOLDER], Reading())
        find_unread(index, listing)
        listing.warnings += [_told(folder.name, unread) for unread in listing.unread]
        domains.append(ImageFiles(folder.name, listing, index))
    for path in archives:
        domain, found = read_archive(path, path.stem, lines, index)
        problems += found
        if domain is not None:
            domains.append(domain)
    problems += _name_problems([path.name for path in folders] + [path.stem for path in archives])
    return sorted(domains, key=lambda domain: domain.name), problems


def _refuse_unlisted_ids(domains: Sequence[RawDomain], code: MaskCode) -> None:
    for domain in domains:
        if isinstance(domain, ImageFiles):
            problem = unlisted_ids(domain.name, domain.mask_ids(), code)
            if problem is not None:
                domain.refuse(problem)


def _survey_sheets(
    root: Path, name: str, sheets: Sequence[Path], label_column: str | None, warnings: list[str]
) -> Survey:
    rules = read_rules(root)
    problems = _name_problems([path.stem for path in sheets])
    cells: list[tables.Cells] = []
    for path in sheets:
        try:
            cells.append(tables.read_cells(path))
        except tables.TableError as error:
            problems.append(error.problem)
    if not cells:
        return survey_tables(name, [], [], problems, warnings)
    rules.require_columns([name for table in cells for name in table.header], root)
    cells = [tables.understood(table, rules) for table in cells]
    try:
        label = tables.find_label_column(cells, label_column or rules.label)
    except tables.TableError as error:
        return survey_tables(name, [], [], [*problems, error.problem], warnings)
    columns = [column for column in cells[0].header if column != label]
    alike = [table for table in cells if set(table.header) - {label} == set(columns)]
    features = features_of_columns(columns, tables.values_of(alike, columns), rules, root / COLUMN_FILE)
    domains: list[RawDomain] = []
    for table in cells:
        own = set(table.header) - {label}
        if own == set(columns):
            domains.append(tables.Table(table.path.stem, table, label, features, rules))
        else:
            only = printable(", ".join(sorted(own ^ set(columns))))
            pair = f"{printable(table.path.name)} and {printable(cells[0].path.name)}"
            problems.append(
                Problem("data-layout", f"{pair} do not have the same columns; only one of them has: {only}.")
            )
    found = survey_tables(name, domains, features, problems, warnings)
    return replace(found, text_columns=_undeclared(columns, features, rules))


def _undeclared(columns: Sequence[str], features: Sequence[str], rules: ColumnRules) -> tuple[str, ...]:
    return tuple(name for name in columns if name not in features and name not in rules.categories)


def _read_class_file(root: Path, index: FileIndex) -> tuple[str, ...] | None:
    """The lines of `<root>/classes.txt`, if there is one."""
    path = root / CLASS_FILE
    if not index.has_file(path):
        return None
    text = unicodedata.normalize("NFC", path.read_text(encoding="utf-8-sig", errors="replace"))
    return tuple(line.strip() for line in text.splitlines() if line.strip())


def _holds_images(index: FileIndex, folder: Path, depth: int = 3) -> bool:
    return bool(index.images(folder)) or (
        depth > 0 and any(_holds_images(index, inner, depth - 1) for inner in index.folders(folder))
    )


def _ignored(paths: Sequence[Path], why: str) -> list[str]:
    return [f"{printable(path.name)} is not read: {why}." for path in paths]


def _told(domain: str, unread: Unread) -> str:
    files = "1 file is" if unread.count == 1 else f"{unread.count:,} files are"
    return f"{printable(domain)}: {files} not read: {unread.why}; the first is {unread.first}."


def _stray(index: FileIndex, root: Path, archives: Sequence[Path], sheets: Sequence[Path]) -> list[str]:
    """A warning of files beside the domains' folders."""
    known = {*archives, *sheets, root / CLASS_FILE}
    stray = [path for path in index.files(root, ("",)) if path not in known]
    if not stray:
        return []
    files = "1 file is" if len(stray) == 1 else f"{len(stray):,} files are"
    return [f"{files} not read: beside the sites' folders, in none of them; the first is {printable(stray[0].name)}."]


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


def _sorted_names(names: Counter[str]) -> tuple[str, ...]:
    numbers = all(label.isascii() and label.isdigit() for label in names)
    return tuple(sorted(names, key=int) if numbers else sorted(names))


def _alike(classes: Sequence[str]) -> list[list[str]]:
    """Groups of class names that differ only in spelling."""
    groups: dict[str, list[str]] = {}
    for label in classes:
        groups.setdefault(plain_name(label.casefold()), []).append(label)
    return [group for group in groups.values() if len(group) > 1]


def _near_misses(classes: Sequence[str], counts: Mapping[str, Counter[str]]) -> list[tuple[str, str]]:
    """Pairs of class names that look like one name and a slip of the pen: the rarer first. Two or more sites that all
    have both mean it."""
    pairs = []
    for i, one in enumerate(classes):
        for other in classes[i + 1 :]:
            if not _is_slip(plain_name(one.casefold()), plain_name(other.casefold())):
                continue
            if len(counts) > 1 and all(found[one] and found[other] for found in counts.values()):
                continue
            total = {name: (sum(found[name] for found in counts.values()), name) for name in (one, other)}
            pairs.append((one, other) if total[one] <= total[other] else (other, one))
    return pairs


def _is_slip(one: str, other: str) -> bool:
    """Whether two names differ by one letter (or two swapped ones) in one word. Words of up to three letters, numbers,
    Roman numbers and `a...` (typical, atypical) are told apart on purpose."""
    words = one.split("_"), other.split("_")
    if len(words[0]) != len(words[1]):
        return False
    differing = [(a, b) for a, b in zip(*words, strict=True) if a != b]
    if len(differing) != 1:
        return False
    short, long = sorted(differing[0], key=len)
    if len(long) < 4 or not short.isalpha() or not long.isalpha() or long == f"a{short}":
        return False
    if all(set(word) <= set("ivxlcdm") for word in (short, long)):
        return False
    start = next((i for i, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), len(short))
    if len(long) == len(short) + 1:
        return short[start:] == long[start + 1 :]
    swapped = short[:start] + short[start + 1 : start + 2] + short[start : start + 1] + short[start + 2 :]
    return len(long) == len(short) and (short[start + 1 :] == long[start + 1 :] or swapped == long)


def _nearly(pair: tuple[str, str], counts: Mapping[str, Counter[str]]) -> Problem:
    rare, usual = pair
    where = ", ".join(f"{count} at {printable(site)}" for site, found in counts.items() if (count := found[rare]))
    return Problem(
        "data-classes",
        f"The class {printable(rare)!r} ({where or 'no samples'}) is nearly {printable(usual)!r}: did you mean that? "
        f"Rename it; or, if both are classes, list all classes in {CLASS_FILE}, one per line (from Python: classes=).",
    )


def _quoted(labels: Sequence[str], limit: int = 8) -> str:
    shown = ", ".join(repr(printable(label)) for label in labels[:limit])
    return shown if len(labels) <= limit else f"{shown} and {len(labels) - limit} more"
