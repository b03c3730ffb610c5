from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedshift.errors import InputError
from fedshift.federation.federation import Federation, Rules
from fedshift.federation.sampling import draw_sites, wanted_sites
from fedshift.rng import Rng
from fedshift.runs.api import Run, fit
from fedshift.runs.config import make_config

SIZES = {"a": 10, "b": 20, "c": 30, "d": 40, "e": 300}


def test_a_number_or_a_share_of_the_sites_one_at_least() -> None:
    assert [wanted_sites(asked, 10) for asked in (3, 20, 0.25, 0.01)] == [3, 10, 2, 1]


def test_the_average_over_draws_is_that_of_all_sites() -> None:
    values = {"a": 1.0, "b": -2.0, "c": 5.0, "d": 3.0, "e": 0.5}
    everyone = sum(SIZES[site] * values[site] for site in SIZES) / sum(SIZES.values())
    drawn = [draw_sites(SIZES, 3, Rng.of(0, turn)) for turn in range(3000)]
    means = [sum(weight * values[site] for site, weight in part.weights.items()) for part in drawn]
    assert all(len(part.sites) == 3 and sum(part.weights.values()) == pytest.approx(1) for part in drawn)
    assert np.mean(means) == pytest.approx(everyone, abs=4 * np.std(means) / np.sqrt(len(means)))
    # 3 of 400 samples for each one: `e` always takes part; the others' chances are 2 * size / 100.
    times = Counter(site for part in drawn for site in part.sites)
    assert times["e"] == 3000
    assert times["a"] / 3000 == pytest.approx(0.2, abs=0.04)
    assert times["d"] / 3000 == pytest.approx(0.8, abs=0.04)


def test_a_site_without_samples_is_never_drawn() -> None:
    assert draw_sites({"a": 0, "b": 3, "c": 3}, 3, Rng.of(1)).sites == ("b", "c")


SITES = tuple(f"s{place}" for place in range(10))


def federation(sizes: dict[str, int], **rules: Any) -> Federation:
    """Its sites are never asked: only draws and averages are looked at."""
    plan: Any = SimpleNamespace(seed=0)
    return Federation(plan, None, SITES, rules=Rules(**rules), sizes={s: {"train": n} for s, n in sizes.items()})  # type: ignore[arg-type]


@pytest.mark.parametrize(("rule", "weight"), [("mean", 1000 / 1009), ("clipped", 4 / 13)])
def test_a_site_that_boasts_counts_4_times_the_median_where_the_rule_guards(rule: str, weight: float) -> None:
    """10 sites of 1 sample, of which one says 1,000. It is always drawn, and counts no more than if all took part."""
    fed = federation(dict.fromkeys(SITES, 1) | {"s3": 1000}, aggregation=rule, sites_per_round=4)
    part = fed.taking_part(SITES)
    assert len(part.sites) == 4
    assert part.weights["s3"] == pytest.approx(weight)
    assert fed.counters["robust.count.s3"] == (rule == "clipped")


@pytest.mark.parametrize("turn", range(20))
def test_what_was_limited_before_the_draw_is_not_limited_again(turn: int) -> None:
    """Where every drawn site answers, the limit of `average` leaves the drawn weights as they are."""
    random = np.random.default_rng(turn)
    sizes = {site: int(size) for site, size in zip(SITES, random.choice([1, 5, 20, 1000], len(SITES)), strict=True)}
    fed = federation(sizes, sites_per_round=int(random.integers(1, len(SITES))))
    part = fed.taking_part(SITES)
    fed.counters.clear()
    weights = [part.weight(site, sizes[site]) for site in part.sites]
    assert fed.believable(weights, part.sites) == weights
    assert not fed.counters


def test_sites_that_are_left_out_are_not_drawn() -> None:
    fed = federation(dict.fromkeys(SITES[2:], 5), sites_per_round=8)
    fed.left_out.update({"s0": "facts", "s1": "facts"})
    assert fed.taking_part(SITES).sites == SITES[2:]


def test_where_all_take_part_they_count_what_they_state() -> None:
    part = federation(dict.fromkeys(SITES, 5)).taking_part(SITES)
    assert part.sites == SITES
    assert part.weight("s1", 7) == 7


def test_a_rule_that_needs_more_sites_than_are_drawn_is_refused(rows: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="needs at least 5 sites, and 4 take part in a round"):
        fit("fedavg", data=rows, out=tmp_path, arch="mlp", aggregation="krum", sites_per_round=4)


@pytest.fixture
def rows() -> dict[str, tuple[NDArray[Any], NDArray[Any]]]:
    x = np.random.default_rng(0).normal(size=(6, 40, 4)).astype(np.float32)
    return {f"s{site}": (x[site], (x[site].sum(axis=1) > 0).astype(np.int64)) for site in range(6)}


def _drawn(run: Run) -> list[tuple[int, str]]:
    return [(row["round"], row["site"]) for row in run.metrics if row["name"] == "took_part"]


def test_a_run_with_two_of_six_sites_is_the_same_on_every_engine(rows: dict[str, Any], tmp_path: Path) -> None:
    keys: dict[str, Any] = {"arch": "mlp", "policy": {"min_samples": 2}, "rounds": 4, "sites_per_round": 2}
    one, two = (fit("fedavg", data=rows, out=tmp_path / str(n), workers=n, **keys) for n in (0, 2))
    assert one.results["model_sha256"] == two.results["model_sha256"]
    assert _drawn(one) == _drawn(two)
    assert Counter(round for round, _ in _drawn(one)) == {1: 2, 2: 2, 3: 2, 4: 2}
    assert len({site for _, site in _drawn(one)}) > 2
    trained = [(row["round"], row["site"]) for row in one.metrics if row["name"] == "train_loss"]
    assert trained == _drawn(one)


@pytest.mark.parametrize("method", ["kd3a", "copa", "csac", "dualadapt", "fada", "single-site", "shot"])
def test_a_method_that_needs_every_answer_refuses(method: str) -> None:
    with pytest.raises(InputError, match=r"sites_per_round: .* asks every site in each round, because"):
        make_config({"method": method, "sites_per_round": 2})


@pytest.mark.parametrize("value", [0, -1, 1.5, "many"])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(InputError, match="sites_per_round"):
        make_config({"sites_per_round": value})
