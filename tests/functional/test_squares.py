from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedshift.functional.tiles import grid, mirrored, stitched, stitched_classes, tile_starts, tile_weights


@pytest.mark.parametrize(
    ("length", "side", "overlap", "starts"),
    [(8, 8, 2, [0]), (5, 8, 2, [0]), (9, 8, 2, [0, 1]), (14, 8, 2, [0, 6]), (16, 8, 0, [0, 8]), (20, 8, 0, [0, 6, 12])],
)
def test_tiles_cover_a_length_with_few(length: int, side: int, overlap: int, starts: list[int]) -> None:
    assert tile_starts(length, side, overlap) == starts


def test_a_grid_has_the_fewest_tiles() -> None:
    assert grid(16, 9, 8) == [(0, 0), (0, 1), (8, 0), (8, 1)]
    assert grid(3, 5, 8) == [(0, 0)]


def test_weights_fall_towards_the_borders() -> None:
    weights = tile_weights(8, 3)
    assert weights[0, 4].item() == pytest.approx(0.25) and weights[0, 0].item() == pytest.approx(0.0625)
    assert (weights[3:5, 3:5] == 1).all() and (weights > 0).all()


def by_pixel(tiles: Tensor) -> Tensor:
    """Scores that depend on the pixel alone, so that blending must change nothing."""
    return torch.cat([tiles[:, :1], tiles[:, 1:2] * 3, -tiles[:, 2:]], dim=1)


@pytest.mark.parametrize("size", [(8, 8), (5, 6), (31, 17), (9, 40)])
def test_stitching_is_what_the_whole_picture_gives(size: tuple[int, int]) -> None:
    picture = torch.randint(0, 256, (*size, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    whole = by_pixel(picture.permute(2, 0, 1)[None].float() / 255).softmax(1)[0]
    torch.testing.assert_close(stitched(by_pixel, picture, 8), whole)
    assert torch.equal(stitched_classes(by_pixel, picture, 8), whole.argmax(0).to(torch.uint8))


def test_where_tiles_overlap_the_nearer_middle_counts_more() -> None:
    """Each tile answers with its own number; along the overlap the answer goes from the first to the second."""
    numbers = iter([0.0, 1.0])

    def numbered(tiles: Tensor) -> Tensor:
        share = torch.tensor([next(numbers) for _ in tiles]).clamp(1e-6, 1 - 1e-6)[:, None, None, None]
        return torch.cat([share.log(), (1 - share).log()], dim=1).expand(-1, -1, 8, 8)

    found = stitched(numbered, torch.zeros(8, 14, 3, dtype=torch.uint8), 8)[0, 4]
    # Weights 2/3 and 1/3 of the left tile meet 1/3 and 2/3 of the right one.
    torch.testing.assert_close(found[5:9], torch.tensor([0.0, 1 / 3, 2 / 3, 1.0]), atol=1e-5, rtol=0)


def test_small_pictures_are_mirrored() -> None:
    assert mirrored(torch.tensor([[1, 2]]), 5).tolist() == [[1, 2, 2, 1, 1]] * 5
