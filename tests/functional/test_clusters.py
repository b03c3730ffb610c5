"""k-means and the gap statistic, by hand and by loop."""

from __future__ import annotations

import math

import pytest
import torch

from fedshift.functional.clusters import gap_statistic, kmeans


def test_two_bundles_are_found_whatever_the_start() -> None:
    """The first two samples, where the centres start, are in one bundle."""
    features = torch.tensor([[0.0, 0.0], [0.0, 1.0], [10.0, 0.0], [10.0, 1.0], [11.0, 0.0]])
    assert kmeans(features, 2).tolist() in ([0, 0, 1, 1, 1], [1, 1, 0, 0, 0])


def test_each_sample_ends_at_its_nearest_mean() -> None:
    features = torch.randn(80, 3, generator=torch.Generator().manual_seed(0))
    found = kmeans(features, 4, steps=100)
    means = torch.stack([features[found == r].mean(0) for r in range(4)])
    for sample, cluster in zip(features, found.tolist(), strict=True):
        assert min(range(4), key=lambda r: math.dist(sample.tolist(), means[r].tolist())) == cluster


def test_fewer_samples_than_clusters_and_equal_samples() -> None:
    assert kmeans(torch.tensor([[1.0], [5.0]]), 3).tolist() == [0, 1]
    assert kmeans(torch.ones(4, 2), 2).tolist() == [0, 0, 0, 0]  # the second centre keeps its place without samples


def test_the_gap_statistic_by_hand() -> None:
    """{0, 3, 4}: (3 + 4 + 1) * 2 / 6; {10, 12}: 2 * 2 / 4; {50}: 0."""
    features = torch.tensor([[0.0], [10.0], [3.0], [50.0], [4.0], [12.0]])
    cluster = torch.tensor([0, 1, 0, 2, 0, 1])
    assert gap_statistic(features, cluster) == pytest.approx(16 / 6 + 1)


def test_the_gap_statistic_is_that_of_a_loop() -> None:
    features = torch.randn(30, 5, generator=torch.Generator().manual_seed(1))
    cluster = torch.arange(30) % 4
    total = 0.0
    for r in range(4):
        rows = features[cluster == r].tolist()
        total += sum(math.dist(a, b) for a in rows for b in rows) / (2 * len(rows))
    assert gap_statistic(features, cluster) == pytest.approx(total, rel=1e-5)


def test_tighter_clusters_have_a_smaller_gap_statistic() -> None:
    features = torch.randn(40, 3, generator=torch.Generator().manual_seed(2))
    centres = torch.tensor([[0.0, 0, 0], [9, 0, 0], [0, 9, 0], [0, 0, 9]])[torch.arange(40) % 4]
    loose, tight = features + centres, 0.1 * features + centres
    assert gap_statistic(tight, kmeans(tight, 4)) < 0.2 * gap_statistic(loose, kmeans(loose, 4))
