"""From what describes samples one by one: FADA's features, DualAdapt's mixtures, FedDG's spectra."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedshift.audit.leakage.inversion import images_with
from fedshift.audit.leakage.messages import Message, as_images
from fedshift.audit.leakage.scores import Finding, features_found, images_found
from fedshift.functional.inversion import Search
from fedshift.functional.mixtures import Axes
from fedshift.functional.spectrum import low_amplitudes
from fedshift.nn.network import Network

MOST_REDRAWN = 32
"""Images that are searched for by their features."""


def network_of(message: Message, net: nn.Module, *, training: bool) -> Network | None:
    """The network that made the features, with the weights that the site was sent."""
    payload = message.payload
    weights = dict(payload.get("model") or {})
    for field, prefix in {"extractor": "backbone.", "classifier": "head."}.items():
        weights |= {prefix + key: value for key, value in (payload.get(field) or {}).items()}
    if not isinstance(net, Network) or set(net.state_dict()) != set(weights):
        return None
    net.load_state_dict(weights)
    return net.train(training)


def by_features(message: Message, field: str, net: nn.Module, others: Tensor, search: Search) -> list[Finding]:
    """Feature vectors of single samples: whose are they, and what images have them?"""
    known = network_of(message, net, training=True)
    if known is None:
        return []
    (rows,) = message.release[field].values()
    return _recognise(lambda images: known.features(images), _different(rows), message, field, others, search)


def by_mixture(message: Message, field: str, net: nn.Module, others: Tensor, search: Search) -> list[Finding]:
    """A component of a mixture that few samples made is near to their features; one of a single sample is its feature,
    as far as the axes reach."""
    terms, source = message.release[field], message.payload.get("source")
    known = network_of(message, net, training=False)
    if known is None or not terms or not source:
        return []
    axes = Axes(**source["axes"])
    if len(axes.centre) != known.backbone.out_features:
        return []

    def reduced(images: Tensor) -> Tensor:
        return (known.features(images) - axes.centre) @ axes.axes

    return _recognise(reduced, terms["means"], message, field, others, search)


def by_spectrum(message: Message, field: str, others: Tensor, radius: int) -> list[Finding]:
    """Low amplitudes of single images: whose are they, and what can be drawn with them? Phases are not known; with all
    at 0 an image is a blob in the right colours."""
    (rows,) = message.release[field].values()
    rows, images = _different(rows), as_images(message.members)
    own, unknown = (low_amplitudes(one, radius).flatten(1) for one in (images, others))
    found = [features_found("whose amplitudes these are", field, rows.flatten(1), own, unknown)]
    height, width = images.shape[2:]
    spectrum = torch.zeros(len(rows), images.shape[1], height, width, dtype=torch.complex64)
    places = torch.arange(-radius, radius + 1)
    spectrum[..., (places % height)[:, None], places % width] = rows.to(torch.complex64)
    drawn = torch.fft.ifft2(spectrum).real.clamp(0, 1)
    return [*found, images_found("images with these amplitudes", field, drawn[: len(images)], images, others)]


def _recognise(
    features_of: Callable[[Tensor], Tensor],
    guesses: Tensor,
    message: Message,
    field: str,
    others: Tensor,
    search: Search,
) -> list[Finding]:
    images = as_images(message.members)
    with torch.no_grad():
        own, unknown = (features_of(one).flatten(1) for one in (images, others))
    found = [features_found("whose features these are", field, guesses, own, unknown)]
    if len(images) <= MOST_REDRAWN:
        wanted = guesses[: len(images)]
        drawn = images_with(lambda guess: features_of(guess).flatten(1), wanted, images.shape[1:], search)
        found.append(images_found("images with these features", field, drawn, images, others))
    return found


def _different(rows: Tensor) -> Tensor:
    """Each row once: a small site repeats its own."""
    return rows[sorted({rows[place].numpy().tobytes(): place for place in range(len(rows))}.values())]
