from __future__ import annotations

import torch

from fedshift.rng import Rng


def test_equal_paths_agree_and_names_cannot_run_together() -> None:
    assert Rng.of(0, 1, "a", "bc").seed() == Rng.of("0", "1", "a").child("bc").seed()
    assert Rng.of("a", "bc").seed() != Rng.of("ab", "c").seed()
    assert Rng.of(1, 2).seed() != Rng.of(2, 1).seed()


def test_the_stream_is_fixed_for_ever() -> None:
    """These numbers are part of every saved run's meaning: a change here changes all results."""
    assert Rng.of(0, 1, "site", "train").seed() == 384321505615807980
    assert torch.rand(1, generator=Rng.of(0).torch()).item() == torch.rand(1, generator=Rng.of(0).torch()).item()
