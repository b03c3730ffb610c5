"""Several methods on a user's own data: every labelled site is held out in turn, or one that is named, and each method
is trained without it. The scores are on its labels, which no training has seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedshift.bench.api import cores
from fedshift.bench.jobs import Column, Job, Row, grid_jobs
from fedshift.bench.records import Record
from fedshift.bench.run import FailedJob, Launcher, OnProgress, run_jobs, silent
from fedshift.bench.selection import MAIN_RULES
from fedshift.bench.tables import Choose, Table, comma_separated, make_table, markdown, text
from fedshift.bench.trees import AUC, POOLED, tree_records, with_auc
from fedshift.data import DataSource, open_dataset
from fedshift.data.domain import Dataset
from fedshift.data.registry import DATASETS, survey
from fedshift.errors import InputError
from fedshift.federation.plan import Setting
from fedshift.files import write_atomically
from fedshift.methods import METHODS, find_about

BASELINE = "fedavg"


@dataclass(frozen=True)
class OwnData:
    """A data set, and which of its sites have labels."""

    dataset: Dataset
    labelled: tuple[str, ...]

    @property
    def unlabelled(self) -> tuple[str, ...]:
        return tuple(name for name in self.dataset.domains if name not in self.labelled)


@dataclass(frozen=True)
class Comparison:
    """`runs` are the folders of all trainings, `tables` one per rule that chooses a round."""

    tables: tuple[Table, ...]
    records: tuple[Record, ...]
    failures: tuple[FailedJob, ...]
    runs: tuple[Path, ...]
    out: Path


def open_own(values: Mapping[str, Any]) -> OwnData:
    """The data that configuration keys name."""
    source = DataSource(
        values.get("dataset"),
        Path(values["data_dir"]) if values.get("data_dir") else None,
        values.get("image_size"),
        values.get("label_column"),
        tile=values.get("tile"),
    )
    dataset = open_dataset(source)
    if source.name in DATASETS:
        return OwnData(dataset, dataset.domains)
    labelled = [domain.name for domain in survey(source).domains if domain.class_counts() is not None or domain.task]
    return OwnData(dataset, tuple(name for name in dataset.domains if name in labelled))


def setting_of(methods: Sequence[str], wanted: str | None) -> Setting:
    """The setting in which all methods can be compared: in another one a site is scored on other samples."""
    abouts = [find_about(method) for method in methods]
    common: list[Setting] = [s for s in ("generalize", "adapt") if all(s in about.settings for about in abouts)]
    if wanted is not None and wanted not in common:
        odd = next((about for about in abouts if wanted not in about.settings), abouts[0])
        raise InputError(
            "config-roles", f"{odd.name} is for {' or '.join(odd.settings)}, not for {wanted}: compare it there"
        )
    if not common:
        told = "; ".join(f"{about.name}: {' or '.join(about.settings)}" for about in abouts)
        raise InputError("config-roles", f"these methods have no setting in common ({told}): compare those of one")
    return common[0] if wanted is None else next(s for s in common if s == wanted)


def held_out_columns(own: OwnData, targets: Sequence[str], setting: Setting) -> list[Column]:
    """One per site that is held out, with the other labelled sites as sources."""
    for target in targets:
        if target in own.unlabelled:
            raise InputError(
                "method-needs",
                f"{target!r} has no labels, so nothing can be compared on it: leave --target out, and each labelled"
                " site is held out in turn",
            )
    held = list(targets) or list(own.labelled)
    if len(own.labelled) < 2:
        raise InputError(
            "config-roles", f"comparing needs two labelled sites or more, and {len(own.labelled)} have labels"
        )
    return [
        Column(name, {"target": name, "sources": [s for s in own.labelled if s != name], "setting": setting})
        for name in held
    ]


def own_jobs(
    methods: Sequence[str], columns: Sequence[Column], values: Mapping[str, Any], seeds: Sequence[int]
) -> list[Job]:
    """`values` are configuration keys that all share, with methods' own keys under their names. Jobs run side by side,
    each in one process."""
    varied = ("method", "target", "sources", "seed")
    common = {"workers": 0, **{key: value for key, value in values.items() if key not in varied}}
    if common.get("data_dir"):
        common["data_dir"] = str(Path(common["data_dir"]).resolve())
    rows = [Row(method, method) for method in methods]
    return [replace(job, is_open=True) for job in grid_jobs(rows, columns, seeds, common, {})]


def compare_methods(
    methods: Sequence[str],
    values: Mapping[str, Any],
    out: Path,
    *,
    seeds: Sequence[int] = (0,),
    jobs: int | None = None,
    progress: OnProgress = silent,
    launcher: Launcher | None = None,
) -> Comparison:
    """Trains every method without each held-out site and writes table.{txt,md,csv} into `out`. Called again, it goes on
    where it was."""
    named = list(dict.fromkeys(find_about(method).name for method in methods))
    if not named:
        raise InputError("config-value", "--methods: name one method or more, a,b,c")
    own = open_own(values)
    targets = [str(values["target"])] if values.get("target") else []
    columns = held_out_columns(own, targets, setting_of(named, values.get("setting")))
    setting = setting_of(named, values.get("setting"))
    found = train_all(own_jobs(named, columns, values, seeds), own.dataset.name, out, jobs, progress, launcher)
    extra = tree_records(own.dataset, columns, setting, seeds) if own.dataset.columns and found.records else []
    records = [*with_auc(found.records, own.dataset, out / "jobs"), *extra]
    found = replace(found, records=tuple(records), tables=own_tables(records, own.dataset.name))
    write_tables(found)
    return found


def train_all(
    wanted: Sequence[Job],
    title: str,
    out: Path,
    jobs: int | None,
    progress: OnProgress,
    launcher: Launcher | None = None,
) -> Comparison:
    outcome = run_jobs(wanted, out, jobs or cores(), progress, launcher)
    runs = dict.fromkeys(out / "jobs" / record.job for record in outcome.records)
    tables = own_tables(outcome.records, title)
    return Comparison(tables, tuple(outcome.records), tuple(outcome.failures), tuple(runs), out)


def own_tables(records: Sequence[Record], title: str) -> tuple[Table, ...]:
    """One per rule that chooses a round, and one of AUC where there are two classes."""
    rows = list(dict.fromkeys(record.row for record in records))
    bounds = [POOLED, *(row for row in rows if row in METHODS and find_about(row).is_bound)]
    baseline = BASELINE if BASELINE in rows and len(rows) > 1 else None
    chosen = [
        (f"held-out sites of {title}", rule, choose, list(records)) for rule, choose in MAIN_RULES.items() if records
    ]
    if ranked := [record for record in records if any(AUC in scores for scores in record.scores.values())]:
        areas: Choose = lambda record: {target: scores[AUC] for target, scores in record.scores.items()}  # noqa: E731
        chosen.append((f"AUC at held-out sites of {title}", "last", areas, ranked))
    return tuple(
        make_table(list(own), choose, rule, name, baseline, None, bounds) for name, rule, choose, own in chosen
    )


def write_tables(found: Comparison) -> None:
    for ending, render in (("txt", text), ("md", markdown)):
        page = "\n\n".join(f"{table.title}; round: {table.rule}\n\n{render(table)}" for table in found.tables)
        write_atomically(found.out / f"table.{ending}", page.encode())
    write_atomically(found.out / "table.csv", comma_separated(*found.tables).encode())
