"""Rules for choosing a round, on curves that are easy to read; logging for them does not change the model."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedshift.bench.records import Record, read, read_run
from fedshift.bench.selection import RULES, highest, picked, rules_compared
from fedshift.federation.federation import Federation
from fedshift.methods.evaluation import certainty
from fedshift.runs.config import make_config
from fedshift.runs.execute import run


def record(**changes: Any) -> Record:
    """Four scored rounds; the second is best on the target."""
    usual: dict[str, Any] = {
        "job": "j",
        "row": "KD3A",
        "column": "t",
        "method": "kd3a",
        "setting": "adapt",
        "dataset": "digits",
        "sources": ["a", "b"],
        "target": "t",
        "home": None,
        "seed": 0,
        "scores": {"t": {"last": 0.5, "source_val": 0.6, "oracle": 0.9}},
        "rounds": [1, 2, 3, 4],
        "val": {"a": [0.1, 0.2, 0.9, 0.3], "b": [0.1, 0.2, 0.7, 0.9]},
        "test": {"t": [0.4, 0.9, 0.6, 0.5]},
        "notes": {
            "consensus_quality": {"": [0.3, 0.8, 0.5, 0.1]},
            "target_entropy": {"t": [0.1, 0.4, 0.5, 0.6]},
            "target_information": {"t": [0.2, 0.3, 0.9, 0.8]},
            "voted_samples": {"": [10, 10, 10, 10]},
            "unsupported_samples": {"": [9, 2, 1, 1]},
        },
        "settings": {"rounds": 4, "sources": ["a", "b"], "target": "t"},
        "bytes": {},
        "seconds": 1.0,
        "counters": {},
        "model_sha256": "",
    }
    return Record(**usual | changes)


@pytest.mark.parametrize(
    ("rule", "score"),
    [
        ("last", 0.5),
        ("source-val", 0.6),  # means .1 .2 .8 .6
        ("consensus", 0.9),
        ("entropy", 0.4),
        ("information", 0.6),
        ("agreement", 0.5),  # supported .1 .8 .9 .9: the latest of equals
        ("oracle", 0.9),
    ],
)
def test_a_rule_picks_its_round(rule: str, score: float) -> None:
    assert picked(record(), rule) == {"t": score}


def test_agreement_of_local_models_counts_the_samples_they_agree_on() -> None:
    notes = {
        "agreement": {"a": [1.0, 0.5, 0.5, 0.5], "b": [1.0, 0.7, 0.7, 0.7]},
        "pseudo_label_share": {"": [0.1, 0.2, 0.4, 0.3]},
    }
    assert picked(record(notes=notes), "agreement") == {"t": 0.6}, ".1, .12, .24, .18"


def test_leave_one_site_out_needs_a_run_for_each_source_without_the_target() -> None:
    def inner(target: str, source: str, curve: list[float]) -> Record:
        settings = {"rounds": 4, "sources": [source], "target": target}
        return record(target=target, sources=[source], test={target: curve}, settings=settings)

    runs = [inner("a", "b", [0.9, 0.2, 0.1, 0.3]), inner("b", "a", [0.8, 0.9, 0.1, 0.2])]
    assert picked(record(), "leave-one-site-out", runs) == {"t": 0.4}, "means .85 .55 .1 .25"
    assert picked(record(), "leave-one-site-out", runs[:1]) == {}, "a source was never held out"
    labelled = replace(runs[1], sources=["a", "t"])
    assert picked(record(), "leave-one-site-out", [runs[0], labelled]) == {}, "it saw labels of the target"


def test_rules_that_do_not_apply_choose_nothing() -> None:
    bare = record(notes={}, val={})
    assert {rule for rule in RULES if picked(bare, rule)} == {"last", "oracle"}
    assert highest([None, 0.2, None]) == 1 and highest([None]) is None


def test_source_val_is_what_the_runs_themselves_chose() -> None:
    records, _ = read(sorted((Path(__file__).parents[2] / "results").glob("*.jsonl")))
    assert len(records) > 100
    for found in records:
        chosen = {target: scores["source_val"] for target, scores in found.scores.items()}
        if not found.val:  # Validation splits too small to be scored: the last round is taken.
            assert chosen == {target: scores["last"] for target, scores in found.scores.items()}
            continue
        assert picked(found, "source-val") == pytest.approx(chosen, abs=1e-6), (found.row, found.column, found.seed)


def test_the_table_says_what_each_rule_loses_to_the_oracle() -> None:
    table = rules_compared([record(), record(seed=1)])
    assert table.baseline == "oracle" and not table.cells["oracle"]["KD3A"].is_best
    assert table.differences["source-val"].mean == pytest.approx(-0.3)
    assert table.differences["consensus"].mean == 0.0 and table.cells["consensus"]["KD3A"].is_best
    assert "leave-one-site-out" not in table.cells


@pytest.fixture(scope="module")
def adapted(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("adapted") / "run"
    settings = {"method": "source-only", "setting": "adapt", "data_dir": tiny_data, "target": "dim", "rounds": 2}
    run(make_config({**settings, "arch": "digits-copa", "batch_size": 8, "workers": 0}), out)
    return out


def test_runs_that_adapt_note_entropy_and_information_of_the_target(adapted: Path) -> None:
    notes = read_run(adapted, "j", "row", "dim").notes
    entropy, information = notes["target_entropy"]["dim"], notes["target_information"]["dim"]
    assert len(entropy) == len(information) == 2
    assert all(e >= 0 and i >= 0 and e + i <= math.log(3) + 1e-9 for e, i in zip(entropy, information, strict=True))
    ledger = [json.loads(line) for line in (adapted / "sites" / "amber" / "ledger.jsonl").read_text().splitlines()]
    ledger = [row for row in ledger if row["event"] == "left"]
    counted = {"confusion", "confidence", "shares", "distances"}
    assert {row["field"] for row in ledger} <= {"model", "samples", "loss"} | counted | {
        row["field"] for row in ledger if row["step"].endswith("introduce")
    }, "it is computed where the target is"


def test_certainty_of_uniform_predictions_is_none(adapted: Path, tiny_data: Path) -> None:
    """All scores alike: entropy log 3, no information."""
    from fedshift.runs.planning import base_network, open_federation, prepare

    settings = {"method": "source-only", "setting": "adapt", "data_dir": tiny_data, "target": "dim"}
    prepared = prepare(make_config({**settings, "arch": "digits-copa", "workers": 0}))
    fed: Federation = open_federation(prepared, adapted / "elsewhere")
    weights = dict(base_network(prepared)[0].state_dict())
    found = fed.at_home(certainty, model={k: torch.zeros_like(v) if "head" in k else v for k, v in weights.items()})
    assert found.entropy == pytest.approx(math.log(3)) and found.information == pytest.approx(0, abs=1e-9)
