"""Sites that train alone and are joined at the end; sites that train in turn."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedshift.errors import SiteError
from fedshift.federation import codec
from fedshift.federation.federation import Replies
from fedshift.methods.base import SHARED
from fedshift.methods.ensembles import Hyper, IndEnsemble, IndParamAvg, InTurn, StateAlone, Trained, Turns, train
from fedshift.nn.archs import build_network
from fedshift.nn.network import Network
from fedshift.runs import planning
from fedshift.runs.config import make_config

SITES = ("amber", "blue", "coral")


class Scripted:
    """A federation whose sites answer every question with the next number; who is `silent` does not answer."""

    def __init__(self, rounds: int = 6, silent: tuple[str, ...] = ()) -> None:
        training = SimpleNamespace(rounds=rounds, local_epochs=2.0)
        self.labelled, self.plan, self.round = SITES, SimpleNamespace(training=training), 1
        self.silent, self.asked, self.answers = silent, [], 0

    def ask(self, sites: tuple[str, ...], step: Any, each: Any = None, everyone: bool = False, **payload: Any) -> Any:
        replies = Replies(step)
        for site in sites:
            own = payload | dict((each or {}).get(site, {}))
            self.asked.append((site, own["epochs"], float(own["model"]["head.bias"][0])))
            if site not in self.silent:
                self.answers += 1
                model = {key: torch.full_like(value, self.answers) for key, value in own["model"].items()}
                replies.add(site, Trained(model=model, loss=0.0), 1)
            elif everyone:
                raise SiteError("site-failed", site)
        return replies

    def note(self, name: str, value: float, site: str = "") -> None: ...


@pytest.fixture
def base() -> Network:
    net = build_network("digits-csac", (3, 16, 16), 3, 0)
    with torch.no_grad():
        net.head.bias.fill_(0.0)
    return net


def plan(data: Path, method: str) -> Any:
    keys = {"method": method, "data_dir": data, "target": "dim", "arch": "digits-csac"}
    return planning.prepare(make_config(keys)).plan


@pytest.mark.parametrize("method", [IndEnsemble(Hyper()), IndParamAvg(Hyper())])
def test_every_site_goes_on_from_its_own_model(method: Any, base: Network) -> None:
    fed: Any = Scripted()
    state = method.init(base, fed)
    for _ in range(2):
        state = method.round(state, fed)
    starts = [(site, 2.0, 0.0) for site in SITES]
    assert fed.asked == [*starts, ("amber", 2.0, 1.0), ("blue", 2.0, 2.0), ("coral", 2.0, 3.0)]
    assert codec.pack(codec.restore(StateAlone, codec.unpack(codec.pack(state)))) == codec.pack(state)


def test_the_ensemble_averages_logits_of_those_who_trained(base: Network, tiny_data: Path) -> None:
    nets = [build_network("digits-csac", (3, 16, 16), 3, seed).eval() for seed in range(3)]
    models: dict[str, dict[str, Tensor]] = {site: dict(net.state_dict()) for site, net in zip(SITES, nets, strict=True)}
    state = StateAlone(models, {"amber": True, "blue": False, "coral": True})
    joined = IndEnsemble.network(plan(tiny_data, "ind-ensemble")).eval()
    joined.load_state_dict(dict(IndEnsemble(Hyper()).models(state)[SHARED]))
    x = torch.rand(5, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(joined(x), (nets[0](x) + nets[2](x)) / 2)


def test_parameters_are_averaged_evenly_over_those_who_trained(base: Network) -> None:
    fed: Any = Scripted(silent=("blue",))
    method = IndParamAvg(Hyper())
    state = method.init(base, fed)
    torch.testing.assert_close(method.models(state)[SHARED]["head.weight"], base.head.weight.detach())
    model = method.models(method.round(state, fed))[SHARED]
    assert bool((model["head.weight"] == 1.5).all())  # amber has 1, coral 2


def test_one_visit_each_gives_every_site_its_share_of_the_rounds_and_the_whole_work(base: Network) -> None:
    fed: Any = Scripted(rounds=6)
    method = InTurn(Turns())
    state = method.init(base, fed)
    for fed.round in range(1, 7):
        state = method.round(state, fed)
    assert [site for site, _, _ in fed.asked] == ["amber", "amber", "blue", "blue", "coral", "coral"]
    assert {epochs for _, epochs, _ in fed.asked} == {6.0}  # 2 rounds of 3 x 2 epochs: 12, as in 6 rounds of 2
    assert [start for _, _, start in fed.asked] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert float(method.models(state)[SHARED]["head.bias"][0]) == 6.0


def test_with_fewer_rounds_than_sites_every_site_is_visited_all_the_same(base: Network) -> None:
    fed: Any = Scripted(rounds=2)
    method = InTurn(Turns())
    state = method.init(base, fed)
    for fed.round in (1, 2):
        state = method.round(state, fed)
    assert [(site, epochs) for site, epochs, _ in fed.asked] == [("amber", 4.0), ("blue", 4.0), ("coral", 4.0)]


def test_visiting_in_every_round_passes_the_model_on(base: Network) -> None:
    fed: Any = Scripted()
    method = InTurn(Turns(visits="every-round"))
    state = method.round(method.init(base, fed), fed)
    assert fed.asked == [("amber", 2.0, 0.0), ("blue", 2.0, 1.0), ("coral", 2.0, 2.0)]
    assert float(state.model["head.bias"][0]) == 3.0


def test_a_chain_ends_where_a_site_is_missing(base: Network) -> None:
    fed: Any = Scripted(silent=("amber",))
    method = InTurn(Turns())
    with pytest.raises(SiteError, match="amber"):
        method.round(method.init(base, fed), fed)


def test_training_at_a_site_lowers_its_loss(tiny_data: Path, tmp_path: Path, base: Network) -> None:
    keys = {"method": "ind-ensemble", "data_dir": tiny_data, "target": "dim", "arch": "digits-csac", "batch_size": 16}
    fed = planning.open_federation(planning.prepare(make_config(keys | {"lr": 0.02})), tmp_path, debug=True)
    try:
        fed.begin(1)
        first = fed.ask(("amber",), train, model=base.state_dict(), epochs=2.0)["amber"]
        fed.begin(2)
        second = fed.ask(("amber",), train, model=first.model, epochs=2.0)["amber"]
    finally:
        fed.engine.close()
    assert second.loss < 0.8 * first.loss


def test_an_unknown_way_of_visiting_is_refused() -> None:
    with pytest.raises(Exception, match="visits"):
        make_config({"method": "sequential", "sequential": {"visits": "never"}})
