"""Random looks of images: other colours and textures, the same shapes.

Z. Xu, D. Liu, J. Yang, C. Raffel, M. Niethammer: Robust and Generalizable Visual Representation Learning via Random
Convolutions. ICLR 2021. S. Choi, D. Das, S. Choi, S. Yang, H. Park, S. Yun: Progressive Random Convolutions for Single
Domain Generalization. CVPR 2023.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedshift.functional.norms import standardised

KERNEL = 3


def random_looks(x: Tensor, generator: torch.Generator, depth: int, spread: float) -> Tensor:
    """A random look of each image `(B, C, H, W)` in [0, 1]; the result has the same form.

    Every image draws a 3x3 filter of all channels, which is applied 1 to `depth` times (one number for the batch): the
    more often, the wider its reach. After each time all channels are standardised over the image, scaled by a number
    from N(1, spread^2), moved by one from N(0, spread^2) and squashed by tanh, so that contrast and colours change too.
    """
    images, channels = x.shape[:2]
    times = int(torch.randint(1, depth + 1, (), generator=generator))
    # He's deviation without its factor 2 keeps the size of values from one time to the next.
    deviation = (channels * KERNEL * KERNEL) ** -0.5
    filters = deviation * torch.randn(images * channels, channels, KERNEL, KERNEL, generator=generator)
    scale = 1 + spread * torch.randn(images, channels, 1, 1, generator=generator)
    shift = spread * torch.randn(images, channels, 1, 1, generator=generator)
    filters, scale, shift = (drawn.to(x.device, x.dtype) for drawn in (filters, scale, shift))
    z = (2 * x - 1).contiguous()  # Rows of pixels are what the steps below are fastest with.
    with torch.autocast(x.device.type, enabled=False):  # Variances in bfloat16 would be too coarse.
        for _ in range(times):
            z = torch.tanh(shift + scale * standardised(filtered(z, filters)))
    return (z + 1) / 2


def filtered(z: Tensor, filters: Tensor) -> Tensor:
    """Each image `(B, C, H, W)` by its own C filters of all channels, `(B C, C, k, k)`. Edges are repeated outwards.

    One product of matrices per image: for so few channels, a convolution with a group for each image takes longer.
    """
    images, channels, height, width = z.shape
    edge = filters.shape[-1] // 2
    around = F.pad(z, (edge,) * 4, mode="replicate").unfold(2, height, 1).unfold(3, width, 1)  # (B, C, k, k, H, W)
    pixels = around.reshape(images, -1, height * width)
    return torch.bmm(filters.reshape(images, channels, -1), pixels).view(z.shape)
