"""From weights to samples: labels, the inputs of dense layers in closed form, and images by search.

Closed form: for one sample, a dense layer's gradient is the error times the input, and its bias' gradient is the error:
their ratio is the input. Of several samples it is a weighted mean, one for each output, and where an output reacts to
one sample only, that sample's own (L. Fowl and others: Robbing the Fed, ICLR 2022).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from fedshift.audit.leakage.messages import Message, Update, as_images
from fedshift.audit.leakage.scores import Finding, features_found, images_found, labels_found
from fedshift.errors import InputError
from fedshift.functional.inversion import Search, infer_labels, invert, search_images
from fedshift.functional.losses import cross_entropy

MOST_REPLAYED, MOST_STATISTICS = 8, 32
"""Steps that are replayed one by one; images that are searched for by their statistics."""
_TINY = 1e-12


def labels_of(update: Update, message: Message) -> Tensor | None:
    """The labels `(n,)` behind an update, from the gradient of the last layer's bias."""
    classes = len(message.plan.model.classes)
    net = update.loaded(update.before).eval()
    biases = [name for name, value in net.named_parameters() if value.shape == (classes,) and "head" in name]
    if not biases:
        return None
    probes = torch.rand(64, *message.plan.model.input_shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        usual = net(probes).softmax(1).mean(0)
    return infer_labels(update.gradient(message)[biases[-1]], usual, len(message.members))


def told_labels(update: Update, message: Message) -> Finding | None:
    guessed = labels_of(update, message)
    if guessed is None or message.members.labels is None:
        return None
    labels = torch.from_numpy(message.members.labels)
    return labels_found("weights", guessed, labels, len(message.plan.model.classes))


def dense_layer(update: Update) -> str | None:
    """The first dense layer whose bias has learned: what comes in there is nearest to the image."""
    net = update.net
    layers = ((name, layer) for name, layer in net.named_modules() if isinstance(layer, nn.Linear))
    return next((name for name, layer in layers if layer.bias is not None and update.has_learned(f"{name}.bias")), None)


def inputs_of_dense(update: Update, message: Message, layer: str) -> Tensor:
    """What came into a dense layer, `(k, d)`: one guess for each output that learned."""
    gradient = update.gradient(message)
    weight, bias = gradient[f"{layer}.weight"], gradient[f"{layer}.bias"]
    used = bias.abs() > 1e-4 * bias.abs().max().clamp_min(_TINY)
    return weight[used] / bias[used, None]


def seen_by(net: nn.Module, layer: str, images: Tensor) -> Tensor:
    """What comes into a layer for images, `(n, d)`. Differentiable."""
    caught: list[Tensor] = []
    handle = net.get_submodule(layer).register_forward_pre_hook(lambda module, given: caught.append(given[0]))
    try:
        net(images)
    finally:
        handle.remove()
    return caught[0].flatten(1)


def closed_form(update: Update, message: Message, others: Tensor, search: Search) -> list[Finding]:
    """The inputs of the first dense layer, and images that have them."""
    net = update.loaded(update.before).train()
    layer = dense_layer(update)
    if layer is None or message.plan.model.task != "classification":
        return []
    guesses = inputs_of_dense(update, message, layer)
    images = as_images(message.members)
    with torch.no_grad():
        own, unknown = (seen_by(net, layer, one) for one in (images, others))
    if not len(guesses) or not bool(guesses.isfinite().all()):
        return []
    found = [features_found(f"inputs of {layer}, closed form", "weights", guesses, own, unknown)]
    if len(images) <= MOST_REPLAYED:
        chosen = guesses[paired_features(guesses, len(images))]
        rebuilt = images_with(lambda guess: seen_by(net, layer, guess), chosen, images.shape[1:], search)
        found.append(images_found(f"images with these inputs of {layer}", "weights", rebuilt, images, others))
    return found


def paired_features(guesses: Tensor, count: int) -> Tensor:
    """The places of `count` guesses that are unlike each other, beginning with one of median length."""
    rows = nn.functional.normalize(guesses, dim=1)
    taken = [int(guesses.norm(dim=1).median(0).indices)]
    while len(taken) < min(count, len(guesses)):
        taken.append(int((rows @ rows[taken].T).max(1).values.argmin()))
    return torch.tensor(taken)


def images_with(
    features_of: Callable[[Tensor], Tensor], wanted: Tensor, shape: Sequence[int], search: Search
) -> Tensor:
    """Images `(k, *shape)` whose features are those wanted `(k, d)`, by search."""
    scale = wanted.square().sum(1).mean().clamp_min(_TINY)
    rough = replace(search, smoothness=search.smoothness / 10)  # Its distances are smaller than those of angles.

    def distance(images: Tensor) -> Tensor:
        return (features_of(images) - wanted).square().sum(1).mean() / scale

    return search_images(distance, (len(wanted), *shape), rough, torch.Generator().manual_seed(1))


def by_gradient(update: Update, message: Message, others: Tensor, search: Search) -> list[Finding]:
    """Images whose gradient explains the update: read as one step, and replayed step by step where there are few."""
    guessed = labels_of(update, message)
    if guessed is None:
        return []
    images, labels = as_images(message.members), guessed
    seen = list(update.gradient(message).values())
    if not sum(float(part.abs().sum()) for part in seen):
        return []
    net = update.loaded(update.before).train()
    shape, draw = tuple(images.shape), torch.Generator().manual_seed(1)

    def once(guess: Tensor) -> Sequence[Tensor]:
        return _gradients(cross_entropy(net(guess), labels), list(net.parameters()))

    found = invert(once, seen, shape, search, draw)
    results = [images_found("gradient inversion, one step", "weights", found, images, others)]
    if 1 < message.steps <= MOST_REPLAYED and message.sites == 1:
        shorter = replace(search, steps=max(20, search.steps // message.steps))
        rate = message.plan.training.lr_at(message.round)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(2))

        def replayed(guess: Tensor) -> Sequence[Tensor]:
            return _replay(net, guess[order], labels[order], message, rate)

        found = invert(
            replayed, [update.before[n] - update.after[n] for n, _ in net.named_parameters()], shape, shorter, draw
        )
        results.append(images_found("gradient inversion, replayed", "weights", found, images, others))
    return results


def _replay(net: nn.Module, images: Tensor, labels: Tensor, message: Message, rate: float) -> list[Tensor]:
    """The update that SGD would make of these images, differentiable in them."""
    training = message.plan.training
    start = {name: value.detach() for name, value in net.named_parameters()}
    weights: dict[str, Tensor] = {name: value.clone().requires_grad_() for name, value in start.items()}
    speed: dict[str, Tensor] = {}
    done = 0
    while done < message.steps:
        for x, y in zip(images.split(training.batch_size), labels.split(training.batch_size), strict=True):
            loss = cross_entropy(functional_call(net, weights, (x,)), y)
            for (name, value), slope in zip(
                list(weights.items()), _gradients(loss, list(weights.values())), strict=True
            ):
                slope = slope + training.weight_decay * value
                speed[name] = slope + training.momentum * speed[name] if name in speed else slope
                weights[name] = value - rate * speed[name]
            done += 1
            if done == message.steps:
                break
    return [start[name] - value for name, value in weights.items()]


def _gradients(loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    return [torch.zeros_like(own) if one is None else one for own, one in zip(parameters, found, strict=True)]


def by_statistics(
    update: Update, statistics: Mapping[str, Tensor] | None, message: Message, others: Tensor, search: Search
) -> list[Finding]:
    """Images whose BatchNorm statistics are those that left: as `statistics` of all samples, or inside weights, where
    they have moved towards those of the batches."""
    net = update.loaded(update.before).train()
    layers = {name: layer for name, layer in net.named_modules() if isinstance(layer, _BatchNorm) and layer.training}
    images = as_images(message.members)
    if not layers or len(images) > MOST_STATISTICS:
        return []
    wanted = {name: _told(update, statistics, name, layer, message.steps) for name, layer in layers.items()}
    known = {name: told for name, told in wanted.items() if told is not None}
    if len(known) < len(layers):
        return []

    def distance(guess: Tensor) -> Tensor:
        caught: dict[str, Tensor] = {}
        handles = [
            layer.register_forward_pre_hook(lambda module, given, name=name: caught.__setitem__(name, given[0]))
            for name, layer in layers.items()
        ]
        try:
            net(guess)
        finally:
            for handle in handles:
                handle.remove()
        parts = []
        for name, (mean, variance) in known.items():
            rows = caught[name].transpose(0, 1).flatten(1)
            scale = variance.mean().clamp_min(_TINY)
            parts.append((rows.mean(1) - mean).square().mean() / scale)
            parts.append((rows.var(1) - variance).abs().mean() / scale)
        return torch.stack(parts).mean()

    found = search_images(distance, tuple(images.shape), search, torch.Generator().manual_seed(1))
    field = "weights" if statistics is None else "statistics"
    return [images_found("images with these BatchNorm statistics", field, found, images, others)]


def _told(
    update: Update, statistics: Mapping[str, Tensor] | None, name: str, layer: _BatchNorm, steps: int
) -> tuple[Tensor, Tensor] | None:
    """The mean and variance of a layer's inputs, as what left tells them."""
    names = [f"{name}.running_mean", f"{name}.running_var"]
    if statistics is not None:
        given = [statistics.get(path, statistics.get(path.removeprefix("backbone."))) for path in names]
        return None if given[0] is None or given[1] is None else (given[0], given[1].clamp_min(0))
    kept = (1 - (layer.momentum or 0.1)) ** steps
    if torch.equal(update.before[names[0]], update.after[names[0]]):
        return None
    mean, variance = ((update.after[path] - kept * update.before[path]) / (1 - kept) for path in names)
    return mean, variance.clamp_min(0)


def require_images(shape: Sequence[int]) -> None:
    if len(shape) != 3:
        raise InputError("method-needs", "the leakage study takes images; rows of a table are not searched for")
