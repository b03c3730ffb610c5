"""What hostile code at a site sends: weights and counts as the attack wants them, all else as it was."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from fedshift.data.attacks import parse_attack
from fedshift.federation.forgery import forged, oversure
from fedshift.federation.releases import Count, Metric, Release, Weights
from fedshift.functional.averaging import update_norm
from fedshift.rng import Rng


@dataclass(frozen=True)
class Trained(Release):
    model: Weights
    samples: Count
    loss: Metric


BEFORE = {"w": torch.tensor([1.0, 2.0]), "bn.running_var": torch.tensor([0.5]), "n": torch.tensor(3)}
HONEST = Trained({"w": torch.tensor([4.0, 6.0]), "bn.running_var": torch.tensor([1.0]), "n": torch.tensor(9)}, 50, 0.25)


def sent(*attacks: str, seed: int = 0) -> Trained:
    return forged(HONEST, {"model": BEFORE}, map(parse_attack, attacks), Rng.of(seed))


def test_a_flipped_update_goes_the_other_way() -> None:
    found = sent("sign-flip:a:10")
    assert found.model["w"].tolist() == [1.0 - 30.0, 2.0 - 40.0]
    assert found.model["bn.running_var"].tolist() == [0.0]  # -4.5 would be refused
    assert (int(found.model["n"]), found.samples, found.loss) == (9, 50, 0.25)


def test_a_constant_model_is_1_everywhere() -> None:
    assert sent("constant:a").model["w"].tolist() == [1.0, 1.0]


def test_scaled_noise_has_the_length_that_was_asked_for() -> None:
    before = {"w": torch.zeros(1000)}
    honest = Trained({"w": torch.full((1000,), 0.1)}, 50, 0.25)
    found, other = (forged(honest, {"model": before}, [parse_attack("scaled-noise:a:5")], Rng.of(n)) for n in (0, 1))
    assert update_norm(found.model, before) == pytest.approx(5 * update_norm(honest.model, before), rel=1e-4)
    assert abs(float(found.model["w"].mean())) < 0.1
    assert not torch.equal(found.model["w"], other.model["w"])
    assert torch.equal(sent("scaled-noise:a:5").model["w"], sent("scaled-noise:a:5").model["w"])


def test_a_boosted_update_goes_the_same_way() -> None:
    assert sent("boost:a:5").model["w"].tolist() == [1.0 + 15.0, 2.0 + 20.0]


def test_a_free_rider_sends_back_what_it_got_and_claims_its_samples() -> None:
    before = {"w": torch.full((1000,), 2.0)}
    honest = Trained({"w": torch.full((1000,), 5.0)}, 50, 0.25)
    found = forged(honest, {"model": before}, [parse_attack("free-rider:a")], Rng.of(0))
    noise = found.model["w"] - before["w"]
    assert found.samples == 50
    assert float(noise.std()) == pytest.approx(0.002, rel=0.1) and abs(float(noise.mean())) < 0.0003


def test_forged_confidence_is_sure_of_the_next_class() -> None:
    head = {"head.weight": torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0]]), "head.bias": torch.tensor([1.0, 2, 3])}
    honest = Trained({"backbone.w": torch.tensor([7.0]), **head}, 50, 0.25)
    found = forged(honest, {"model": dict(honest.model)}, [parse_attack("forged-confidence:a:10")], Rng.of(0)).model
    assert found["head.weight"].tolist() == [[30.0, 30.0], [10.0, 0.0], [0.0, 20.0]]
    assert found["head.bias"].tolist() == [30.0, 10.0, 20.0]
    assert found["backbone.w"].tolist() == [7.0]


def test_of_a_head_with_several_layers_the_last_one_is_forged() -> None:
    head = {"0.weight": torch.ones(2, 2), "2.weight": torch.tensor([[1.0], [2.0]]), "2.bias": torch.zeros(2)}
    assert {name: value.tolist() for name, value in oversure(head, 3.0).items()} == {
        "2.weight": [[6.0], [3.0]],
        "2.bias": [0.0, 0.0],
    }
    assert oversure({}, 3.0) == {}


def test_a_count_is_forged_and_attacks_add_up() -> None:
    found = sent("forged-count:a", "sign-flip:a:1")
    assert found.samples == 10**12 and found.model["w"].tolist() == [-2.0, -2.0]
    assert sent("forged-count:a:7").samples == 7


def test_attacks_on_data_leave_the_message_alone() -> None:
    assert sent("poison:a:0.3", "noise:a", "backdoor:a:0.5", "irrelevant:a") is HONEST


def test_without_a_model_to_start_from_the_update_is_the_model() -> None:
    assert forged(HONEST, {}, [parse_attack("sign-flip:a:1")], Rng.of(0)).model["w"].tolist() == [-4.0, -6.0]
