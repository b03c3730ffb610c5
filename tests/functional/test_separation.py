from __future__ import annotations

import pytest
import torch

from fedshift.functional.clusters import separation


def test_two_pairs_on_a_rectangle_by_hand() -> None:
    points = torch.tensor([[0.0, 0.0], [0.0, 3.0], [4.0, 0.0], [4.0, 3.0]])
    distances = torch.cdist(points, points)
    # Short sides are 3, long ones 4, diagonals 5.
    along = separation(distances, torch.tensor([0, 0, 1, 1]))
    assert (along.within, along.between, along.nearest) == pytest.approx((3.0, 4.5, 1.0))
    across = separation(distances, torch.tensor([0, 1, 0, 1]))
    assert (across.within, across.between, across.nearest) == pytest.approx((4.0, 4.0, 0.0))


def test_a_point_is_not_its_own_neighbour() -> None:
    points = torch.tensor([[0.0], [1.0], [1.4], [9.0]])
    found = separation(torch.cdist(points, points), torch.tensor([0, 0, 1, 1]))
    # The nearest of 0 is 1 (right), of 1 is 1.4 (wrong), of 1.4 is 1 (wrong), of 9 is 1.4 (right).
    assert found.nearest == 0.5
    assert found.within == pytest.approx((1.0 + 7.6) / 2)
    assert found.between == pytest.approx((1.4 + 9.0 + 0.4 + 8.0) / 4)
