"""FedADG: the three adversarial losses, who learns from which, and what stays at a site."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedshift.data.batches import LabelledBatch
from fedshift.errors import InputError
from fedshift.federation import codec
from fedshift.federation.federation import Federation, Replies
from fedshift.federation.sampling import TakingPart
from fedshift.federation.store import read_state
from fedshift.functional.averaging import weighted_mean
from fedshift.functional.losses import cross_entropy
from fedshift.methods import fedadg
from fedshift.methods.fedadg import (
    Discriminator,
    FedADG,
    Generator,
    Hyper,
    Players,
    State,
    Trained,
    discriminator_loss,
    extractor_loss,
    generator_loss,
    play,
    players_loss,
)
from fedshift.nn.archs import build_network
from fedshift.nn.network import Network, seeded_init
from fedshift.runs import planning
from fedshift.runs.config import make_config

CLASSES = 3


def test_losses_by_hand() -> None:
    reference, features = torch.tensor([1.0, 0.5]), torch.tensor([0.0, 0.2])
    assert discriminator_loss(reference, features).item() == pytest.approx((0.0 + 0.25 + 0.04) / 2)
    assert extractor_loss(features).item() == pytest.approx((1.0 + 0.64) / 2)
    assert generator_loss(reference).item() == pytest.approx((1.0 + 0.25) / 2)


def test_a_discriminator_that_cannot_tell_loses_one_half() -> None:
    assert discriminator_loss(torch.full((4,), 0.5), torch.full((4,), 0.5)).item() == 0.5


def test_sizes_are_the_authors_in_proportion() -> None:
    """At AlexNet's 4096 features noise of 2048, 4096 hidden units and a projection to 1024; here a 64th of it."""
    generator, discriminator = Generator(64, 7, Hyper()), Discriminator(64, 7, Hyper())
    assert [tuple(p.shape) for p in generator.parameters()] == [(64, 32 + 7), (64,), (64, 64), (64,)]
    assert discriminator.projection.shape == (16, 64)
    assert [tuple(p.shape) for p in discriminator.parameters()] == [(16, 16 + 7), (16,), (1, 16), (1,)]


@dataclasses.dataclass
class Game:
    net: Network
    generator: Generator
    discriminator: Discriminator
    batch: LabelledBatch
    noise: Tensor

    @property
    def players(self) -> Players:
        """Only D moves: the others have a learning rate of 0, and their gradients can be compared."""
        still = torch.optim.SGD([*self.net.parameters(), *self.generator.parameters()], lr=0.0)
        moving = torch.optim.SGD(self.discriminator.parameters(), lr=0.1)
        return Players(self.net, self.generator, self.discriminator, still, moving)

    def play(self, hyper: Hyper) -> tuple[Tensor, Tensor]:
        return play(self.players, self.batch, self.noise, hyper)


@pytest.fixture
def game() -> Game:
    """Without normalisation layers: the same weights give the same features every time."""
    net = build_network("digits-csac", (3, 16, 16), CLASSES, 0).eval()
    features = net.backbone.out_features
    with seeded_init(1):
        generator, discriminator = Generator(features, CLASSES, Hyper()), Discriminator(features, CLASSES, Hyper())
    draw = torch.Generator().manual_seed(0)
    x, noise = torch.rand(6, 3, 16, 16, generator=draw), torch.rand(6, generator.noise, generator=draw)
    batch = LabelledBatch(x, torch.arange(6) % CLASSES, torch.arange(6))
    return Game(net, generator, discriminator, batch, noise)


def gradients(module: torch.nn.Module) -> list[Tensor | None]:
    return [None if weight.grad is None else weight.grad.clone() for weight in module.parameters()]


def same(left: list[Tensor | None], right: list[Tensor | None]) -> bool:
    return all(a is not None and b is not None and torch.allclose(a, b) for a, b in zip(left, right, strict=True))


def test_a_batch_of_the_game_recomputed(game: Game) -> None:
    """D's loss is the one before its step; the others' is measured against D after it."""
    hyper, y = Hyper(smoothing=0.0), game.batch.y
    features, reference = game.net.features(game.batch.x), game.generator(game.noise, y)
    before = discriminator_loss(game.discriminator(reference, y), game.discriminator(features, y))
    loss, d_loss = game.play(hyper)
    torch.testing.assert_close(d_loss, before.detach())
    after = discriminator_loss(game.discriminator(reference, y), game.discriminator(features, y))
    assert after < before
    error = cross_entropy(game.net(game.batch.x), y)
    f_loss = 0.85 * error + 0.15 * extractor_loss(game.discriminator(features, y))
    expected = f_loss + generator_loss(game.discriminator(reference, y))
    torch.testing.assert_close(loss, expected.detach())


def test_no_gradient_reaches_the_discriminator_from_the_others_loss(game: Game) -> None:
    y = game.batch.y
    features, reference = game.net.features(game.batch.x), game.generator(game.noise, y)
    game.discriminator.zero_grad()
    discriminator_loss(game.discriminator(reference.detach(), y), game.discriminator(features.detach(), y)).backward()
    own = gradients(game.discriminator)
    loss, d_loss = game.play(Hyper())
    assert same(gradients(game.discriminator), own) and not loss.requires_grad and not d_loss.requires_grad
    assert all(weight.requires_grad for weight in game.discriminator.parameters())
    assert all(gradient is not None and gradient.any() for gradient in gradients(game.generator))


def test_the_loss_of_the_players_moves_nothing(game: Game) -> None:
    """It is a function of tensors: steps are taken by the game."""
    modules = (game.net, game.generator, game.discriminator)
    before = [value.clone() for module in modules for value in module.state_dict().values()]
    y = game.batch.y
    loss = players_loss(game.players, game.net.features(game.batch.x), game.generator(game.noise, y), y, Hyper())
    after = [value for module in modules for value in module.state_dict().values()]
    assert loss.requires_grad and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not any(gradient is not None for module in modules for gradient in gradients(module))


def test_the_generator_learns_from_its_own_loss_alone(game: Game) -> None:
    game.play(Hyper())
    found = gradients(game.generator)
    game.generator.zero_grad()
    reference = game.generator(game.noise, game.batch.y)
    generator_loss(game.discriminator(reference, game.batch.y)).backward()
    assert same(found, gradients(game.generator))


def test_without_its_weight_the_game_leaves_classification_alone(game: Game) -> None:
    game.play(Hyper(adversarial=0.0, smoothing=0.1))
    found = gradients(game.net)
    game.net.zero_grad()
    cross_entropy(game.net(game.batch.x), game.batch.y, smoothing=0.1).backward()
    assert same(found, gradients(game.net))


def test_the_adversarial_part_moves_the_extractor_but_not_the_classifier(game: Game) -> None:
    game.play(Hyper(adversarial=1.0))
    assert any(gradient is not None and gradient.any() for gradient in gradients(game.net.backbone))
    assert not any(gradient is not None and gradient.any() for gradient in gradients(game.net.head))


def test_both_adversaries_look_at_the_label(game: Game) -> None:
    other = (game.batch.y + 1) % CLASSES
    first, second = game.generator(game.noise, game.batch.y), game.generator(game.noise, other)
    assert not torch.allclose(first, second)
    assert not torch.allclose(game.discriminator(first, game.batch.y), game.discriminator(first, other))
    assert first.min() >= 0


def test_the_projection_is_random_fixed_and_keeps_lengths_in_scale(game: Game) -> None:
    before = game.discriminator.projection.clone()
    game.play(Hyper())
    assert torch.equal(game.discriminator.projection, before)
    assert "projection" not in dict(game.discriminator.named_parameters())
    torch.testing.assert_close(before.norm(dim=1), torch.ones(len(before)))


def federation(data: Path, folder: Path, **keys: Any) -> tuple[FedADG, State, Federation]:
    values = {"method": "fedadg", "target": "dim", "data_dir": data, "arch": "digits-csac", "workers": 0}
    prepared = planning.prepare(make_config(values | {"rounds": 2, "train_per_site": 40, "lr": 0.02, "fedadg": keys}))
    fed = planning.open_federation(prepared, folder)
    fed.begin(1)
    method = FedADG(codec.restore(Hyper, dict(prepared.plan.hyper)))
    return method, method.init(planning.base_network(prepared)[0], fed), fed


def kept(folder: Path, site: str, round: int) -> dict[str, Tensor]:
    tree: dict[str, Tensor] = read_state(folder / site / "state" / f"discriminator@{round}.safetensors")
    return tree


def test_every_site_keeps_a_discriminator_of_its_own(tiny_data: Path, tmp_path: Path) -> None:
    method, state, fed = federation(tiny_data, tmp_path)
    state = method.round(state, fed)
    fed.begin(2)
    method.round(state, fed)
    projections = [kept(tmp_path, site, 1)["projection"] for site in ("amber", "blue")]
    assert not torch.allclose(*projections)
    assert torch.equal(kept(tmp_path, "blue", 2)["projection"], projections[1])
    assert not torch.equal(kept(tmp_path, "blue", 2)["layers.0.weight"], kept(tmp_path, "blue", 1)["layers.0.weight"])
    assert not [field.name for field in dataclasses.fields(Trained) if field.name == "discriminator"]
    noted = {note.name for note in fed.notes}
    assert noted == {"train_loss", "discriminator_loss"}


def test_with_warmup_alone_nobody_plays(tiny_data: Path, tmp_path: Path) -> None:
    method, state, fed = federation(tiny_data, tmp_path, warmup=1.0)
    after = method.round(state, fed)
    assert all(torch.equal(after.generator[key], value) for key, value in state.generator.items())
    assert not torch.equal(after.model["head.weight"], state.model["head.weight"])


def test_every_site_counts_the_same() -> None:
    """Sites of 1 and 99 samples with weights 0 and 4 give 2."""

    def trained(value: float, samples: int) -> Trained:
        weights: Mapping[str, Tensor] = {"w": torch.full((2,), value)}
        return Trained(model=weights, generator=weights, samples=samples, loss=0.0, discriminator_loss=0.0)

    replies = Replies(fedadg.train)
    for site, reply in (("a", trained(0.0, 1)), ("b", trained(4.0, 99))):
        replies.add(site, reply, 1)
    asked: dict[str, Any] = {"ask": lambda *_, **__: replies, "note": lambda *_: None}
    asked["taking_part"] = lambda sites, **_: TakingPart(sites)
    fed: Any = SimpleNamespace(labelled=("a", "b"), average=lambda models, **_: weighted_mean(models()), **asked)
    after = FedADG(Hyper()).round(State({"w": torch.zeros(2)}, {"w": torch.zeros(2)}), fed)
    assert after.model["w"].tolist() == after.generator["w"].tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("key", "value"), [("adversarial", 1.5), ("warmup", -0.1), ("noise", 0.0), ("projection", -1.0)]
)
def test_values_out_of_range_are_refused(key: str, value: float) -> None:
    with pytest.raises(InputError, match=f"{key} must be"):
        make_config({"method": "fedadg", "fedadg": {key: value}})
