"""Samples to look at: pictures with what was predicted for them, and for segmentation coloured masks."""

from __future__ import annotations

import base64
import colorsys
import io
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import BaseModel, Field
from torch import Tensor

from fedshift.data.domain import VOID, Split

Images = NDArray[np.uint8]

_LARGEST = 160
"""Longer sides are reduced to so many pixels."""
_QUALITY = 88
_MASK_SHARE = 0.68

Jpeg = Annotated[str, Field(pattern=r"^[A-Za-z0-9+/]+={0,2}$")]
"""A JPEG file in base64: nothing that could end an attribute."""


class Shot(BaseModel):
    """A picture, what was predicted and what it is, where that is known."""

    image: Jpeg
    prediction: str
    confidence: float
    truth: str | None = None

    @property
    def is_right(self) -> bool | None:
        return None if self.truth is None else self.truth == self.prediction


class Scene(BaseModel):
    """A picture and the classes of its pixels as colours; `score` is the share of right pixels."""

    image: Jpeg
    prediction: Jpeg
    truth: Jpeg | None = None
    score: float | None = None


class Strip(BaseModel):
    """Samples of one domain: `random` ones, and the mistakes that the model was surest of."""

    domain: str
    is_target: bool
    looked_at: int
    random: list[Shot] = []
    mistakes: list[Shot] = []
    scenes: list[Scene] = []


def class_hue(index: int, count: int) -> int:
    """The hue of a class in degrees: evenly spread, so that each is as far from its neighbours as can be."""
    return round(360 * index / max(count, 1)) % 360


def class_colour(index: int, count: int) -> tuple[int, int, int]:
    """The same hue as on charts, alternating in lightness."""
    lightness = 0.56 if index % 2 else 0.42
    red, green, blue = colorsys.hls_to_rgb(class_hue(index, count) / 360, lightness, 0.62)
    return round(255 * red), round(255 * green), round(255 * blue)


def shots(split: Split, probabilities: Tensor, classes: tuple[str, ...], count: int) -> tuple[list[Shot], list[Shot]]:
    """The first `count` of (already shuffled) samples, and the surest mistakes among all of them."""
    sure, predicted = probabilities.max(1)
    guesses, confidences = predicted.tolist(), sure.tolist()

    def shot(index: int) -> Shot:
        truth = None if split.labels is None else classes[int(split.labels[index])]
        image = encode(split.inputs[index])
        return Shot(image=image, prediction=classes[guesses[index]], confidence=confidences[index], truth=truth)

    wrong = [] if split.labels is None else [i for i in range(len(split)) if guesses[i] != int(split.labels[i])]
    surest = sorted(wrong, key=lambda index: -confidences[index])[:count]
    return [shot(index) for index in range(min(count, len(split)))], [shot(index) for index in surest]


def scenes(split: Split, probabilities: Tensor, classes: int, count: int) -> list[Scene]:
    """The first `count` pictures with their predicted and true masks laid over them."""
    predicted = probabilities.argmax(1).numpy()
    found = []
    for index in range(min(count, len(split))):
        image, mask = split.inputs[index], predicted[index]
        truth = None if split.labels is None else split.labels[index]
        known = None if truth is None else truth != VOID
        score = None if known is None or not known.any() else float((mask == truth)[known].mean())
        found.append(
            Scene(
                image=encode(image),
                prediction=encode(overlay(image, mask, classes)),
                truth=None if truth is None else encode(overlay(image, truth, classes)),
                score=score,
            )
        )
    return found


def overlay(image: Images, mask: NDArray[Any], classes: int) -> Images:
    """The picture in grey under the colours of its classes; pixels without a label stay grey."""
    grey = np.repeat(image.mean(2, keepdims=True), 3, axis=2)
    palette = np.array([class_colour(index, classes) for index in range(classes)], np.float32)
    labelled = (mask < classes)[..., None]
    colour = palette[np.where(mask < classes, mask, 0)]
    mixed = np.where(labelled, _MASK_SHARE * colour + (1 - _MASK_SHARE) * grey, grey)
    return mixed.round().astype(np.uint8)


def encode(image: Images) -> str:
    picture = Image.fromarray(np.ascontiguousarray(image))
    picture.thumbnail((_LARGEST, _LARGEST))
    buffer = io.BytesIO()
    picture.save(buffer, format="JPEG", quality=_QUALITY, subsampling=0)
    return base64.b64encode(buffer.getvalue()).decode()
