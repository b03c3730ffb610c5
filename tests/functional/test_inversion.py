from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from fedshift.functional.inversion import (
    Search,
    cosine_distance,
    infer_labels,
    invert,
    momentum_total,
    psnr,
    ssim,
    total_variation,
)
from fedshift.functional.losses import cross_entropy


def test_cosine_distance_by_hand() -> None:
    # (3, 4) over two tensors and (4, 3): cos = 24 / 25. Lengths do not matter, directions do.
    found, seen = [torch.tensor([3.0]), torch.tensor([[4.0]])], [torch.tensor([4.0]), torch.tensor([[3.0]])]
    assert cosine_distance(found, seen) == pytest.approx(1 / 25)
    assert cosine_distance([10 * part for part in found], found) == pytest.approx(0)
    assert cosine_distance([-part for part in found], found) == pytest.approx(2)


def test_total_variation_by_hand() -> None:
    image = torch.tensor([[[[0.0, 1.0], [0.5, 0.5]]]])
    # Across: |1 - 0| and 0, mean 0.5. Down: 0.5 and 0.5, mean 0.5.
    assert total_variation(image) == pytest.approx(1.0)
    assert total_variation(torch.full((2, 3, 4, 4), 0.7)) == 0


def test_psnr_by_hand() -> None:
    original = torch.zeros(2, 3, 4, 4)
    found = torch.stack([torch.full((3, 4, 4), 0.1), torch.full((3, 4, 4), 0.5)])
    # Mean squared errors 0.01 and 0.25: 20 dB and 10 log10(4) = 6.0206 dB.
    torch.testing.assert_close(psnr(found, original), torch.tensor([20.0, 6.0206]), rtol=1e-4, atol=0)
    assert psnr(original, original).tolist() == [math.inf, math.inf]


def test_labels_are_exact_where_the_predictions_are_known() -> None:
    # Four samples, three classes, labels 2, 0, 2, 2, every prediction (1/2, 1/4, 1/4): the gradient of the bias is
    # (1/2 - 1/4, 1/4 - 0, 1/4 - 3/4).
    gradient, predicted = torch.tensor([0.25, 0.25, -0.5]), torch.tensor([0.5, 0.25, 0.25])
    assert infer_labels(gradient, predicted, 4).tolist() == [0, 2, 2, 2]


def test_labels_of_a_real_gradient() -> None:
    torch.manual_seed(0)
    layer, features, labels = nn.Linear(6, 5), torch.randn(8, 6), torch.tensor([4, 1, 1, 0, 4, 4, 4, 2])
    scores = layer(features)
    gradient = torch.autograd.grad(cross_entropy(scores, labels), [layer.bias])[0]
    assert infer_labels(gradient, scores.softmax(1).mean(0), 8).tolist() == sorted(labels.tolist())


def test_shares_that_are_not_whole_still_add_up() -> None:
    found = infer_labels(torch.tensor([0.4, -0.35, -0.25]), torch.full((3,), 1 / 3), 3)
    # Shares 0, 0.683, 0.583 make 0, 1.62 and 1.38 samples of three: the larger remainder has the odd one.
    assert found.tolist() == [1, 1, 2]


@pytest.mark.parametrize(("steps", "momentum"), [(1, 0.9), (3, 0.0), (4, 0.9)])
def test_an_update_divided_by_the_total_is_the_mean_gradient(steps: int, momentum: float) -> None:
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=momentum)
    for _ in range(steps):
        weight.grad = torch.tensor([-2.0])
        optimizer.step()
    assert float(weight.detach()) / 0.1 / momentum_total(steps, momentum) == pytest.approx(2.0)


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 4))


def gradients(module: nn.Module, images: Tensor, labels: Tensor) -> Sequence[Tensor]:
    return torch.autograd.grad(cross_entropy(module(images), labels), list(module.parameters()), create_graph=True)


def test_one_image_is_rebuilt_from_its_gradient() -> None:
    module, label = net(), torch.tensor([1])
    image = torch.zeros(1, 3, 8, 8)
    image[:, 0, 2:6, 1:4], image[:, 1, 4:, 4:] = 0.9, 0.6
    seen = [part.detach() for part in gradients(module, image, label)]
    search, generator = Search(steps=300), torch.Generator().manual_seed(0)
    found = invert(lambda x: gradients(module, x, label), seen, (1, 3, 8, 8), search, generator)
    assert float(psnr(found, image)) > 25
    wrong = invert(lambda x: gradients(module, x, torch.tensor([2])), seen, (1, 3, 8, 8), search, generator)
    assert float(psnr(wrong, image)) < 15, "with the wrong label there is nothing to find"


def test_similarity_is_1_for_equal_images_and_about_0_for_unrelated_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = torch.rand(2, 3, 16, 16, generator=generator), torch.rand(2, 3, 16, 16, generator=generator)
    assert torch.allclose(ssim(one, one), torch.ones(2, dtype=torch.float64))
    assert float(ssim(one, other).abs().max()) < 0.1
    # Constant images of 0.2 and 0.4 in one window: (2 * 0.08 + 1e-4) / (0.04 + 0.16 + 1e-4) by hand.
    flat = ssim(torch.full((1, 1, 7, 7), 0.2), torch.full((1, 1, 7, 7), 0.4))
    assert float(flat) == pytest.approx((0.16 + 1e-4) / (0.2 + 1e-4), abs=1e-5)
