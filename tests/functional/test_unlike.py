from __future__ import annotations

import pytest
import torch

from fedshift.functional.unlike import Spread, apart, by_chance, even_edges, is_unlike, spread_of, spread_of_counts

EDGES = tuple(step / 20 for step in range(1, 20))


def drawn(count: int, seed: int, power: float = 1.0) -> Spread:
    return spread_of(torch.rand(count, generator=torch.Generator().manual_seed(seed)) ** power, EDGES)


def test_shares_below_edges_can_be_recomputed_by_hand() -> None:
    assert spread_of_counts(torch.tensor([2, 0, 6, 2]), [0, 2]) == Spread(10, (0.2, 0.8))
    assert spread_of(torch.tensor([0.1, 0.3, 0.9, 0.5]), [0.3, 0.8]) == Spread(4, (0.25, 0.75))
    assert even_edges(torch.tensor([4, 0, 4, 2]), 2) == [2]
    assert apart(Spread(1, (0.2, 0.5)), Spread(9, (0.3, 0.1))) == pytest.approx(0.4)
    # Smirnov: sqrt(-ln(0.005 / 2) / 2 * (1/100 + 1/100)) = 0.2448
    assert by_chance(100, 100, 0.005) == pytest.approx(0.24477, abs=1e-4)


def test_inputs_of_one_of_the_sites_are_rarely_called_unlike() -> None:
    """200 folders of 100 inputs from one of three sites: by chance at most half a per cent, one here."""
    sites = [drawn(80, seed, power) for seed, power in enumerate((0.5, 1.0, 2.0))]
    alarms = sum(is_unlike(drawn(100, 1000 + seed, (0.5, 1.0, 2.0)[seed % 3]), sites) for seed in range(200))
    assert alarms <= 2


def test_a_shift_is_seen_in_many_inputs_and_not_in_few() -> None:
    sites = [drawn(80, seed, power) for seed, power in enumerate((0.8, 1.0, 1.25))]
    assert all(is_unlike(drawn(150, 1000 + seed, 4.0), sites) for seed in range(50))
    assert not any(is_unlike(drawn(2, 1000 + seed, 4.0), sites) for seed in range(50))
    assert not is_unlike(drawn(100, 0), []) and not is_unlike(Spread(0, ()), sites)
