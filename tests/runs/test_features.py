"""Features of a network and their map, on numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import torch

from fedshift.data.domain import VOID
from fedshift.nn.archs import build_network
from fedshift.nn.network import Ensemble
from fedshift.runs.features import feature_points, flatten, neighbours_agree, network_outputs


def test_features_are_what_the_head_takes_in() -> None:
    net = build_network("digits-copa", (3, 16, 16), 3, 0).eval()
    inputs = torch.rand(70, 3, 16, 16)
    seen = network_outputs(net, inputs)
    with torch.inference_mode():
        assert torch.equal(seen.features, torch.cat([net.features(part) for part in inputs.split(64)]))
        assert torch.allclose(seen.probabilities, net(inputs).softmax(1), atol=1e-6)
    two = network_outputs(Ensemble(net, 2, "logits").eval(), inputs[:4])
    assert torch.equal(two.features, torch.cat([seen.features[:4]] * 2, dim=1))


def test_a_class_of_a_picture_is_the_mean_over_its_places() -> None:
    features = torch.arange(16.0).reshape(1, 1, 4, 4)
    mask = np.zeros((1, 4, 4), np.uint8)
    mask[0, 2:], mask[0, 0, 0], mask[0, 0, 1] = 2, VOID, 1
    points, classes = feature_points(features, mask)
    # Class 0 covers 2..7, class 2 covers 8..15; class 1 has one place only, which is too few.
    assert points.tolist() == [[4.5], [11.5]] and classes.tolist() == [0, 2]
    points, classes = feature_points(features, None)
    assert points.tolist() == [[7.5]] and classes.tolist() == [-1]


def test_groups_that_are_apart_stay_apart_and_the_map_is_the_same_every_time() -> None:
    rng = np.random.default_rng(0)
    group = np.repeat([0, 1], 30)
    points = (rng.normal(size=(60, 20)) + 30 * group[:, None]).astype(np.float32)
    flat = flatten(points)
    assert np.array_equal(flat, flatten(points)) and flat.min() == 0 and flat.max() == 1
    assert neighbours_agree(flat, group, np.arange(60) % 2 == 0) == 1.0
    for same in (np.zeros((40, 8), np.float32), np.full((40, 8), 3e7, np.float32)):
        assert flatten(same).tolist() == [[0.5, 0.5]] * 40
    one_apart = np.zeros((40, 8), np.float32)
    one_apart[0] = 1e-3
    assert np.isfinite(flatten(one_apart)).all()
    assert flatten(points[:3]).tolist() == [[0.5, 0.5]] * 3


def test_neighbours_are_counted_among_labelled_sources() -> None:
    points = np.array([[1, 0], [0, 1], [1, 0.1], [0.1, 1], [1, 0.2]], np.float32)
    is_target = np.array([False, False, True, True, True])
    # The nearest sources are 0, 1, 0; the last target has no label.
    assert neighbours_agree(points, np.array([7, 8, 7, 7, -1]), is_target) == 0.5
    assert neighbours_agree(points, np.array([-1, -1, 7, 7, 7]), is_target) is None
