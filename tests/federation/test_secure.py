"""Secure aggregation: sums are right, single messages tell nothing, and keys of others are theirs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2

import fedshift
from fedshift.errors import FedshiftError, SiteError
from fedshift.federation.masking import LARGEST_WIDE, Layout, Sum, Vault, pair_key, scales
from fedshift.federation.policy import Policy
from fedshift.functional.averaging import weighted_mean

SITES = ("amber", "blue", "coral", "dim")
HELD = "averaging.train/model"


def model(seed: int, size: int = 3000) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(size, generator=generator),
        "bn.running_var": 50 + 100 * torch.rand(4, generator=generator),
        "bn.num_batches_tracked": torch.tensor(3),
    }


OLD = model(99)
COUNTS = {"amber": 10, "blue": 800, "coral": 41, "dim": 3}


def held(folder: Path, sites: tuple[str, ...] = SITES, kits: dict[str, Path] | None = None) -> dict[str, Vault]:
    found = {site: Vault(folder / site, site, (kits or {}).get(site)) for site in sites}
    for number, (site, vault) in enumerate(found.items()):
        vault.hold(HELD, 1, model(number), OLD, COUNTS[site])
    return found


def wanted(vaults: dict[str, Vault], **changes: Any) -> Sum:
    keys = {site: vault.public() for site, vault in vaults.items()}
    return Sum(**{"round": 1, "held": HELD, "keys": keys, "counted": True, "largest": 800, **changes})


@pytest.mark.parametrize("counted", [True, False])
def test_the_sum_of_masked_messages_is_the_weighted_sum(counted: bool, tmp_path: Path) -> None:
    vaults = held(tmp_path)
    messages = [vault.masked(wanted(vaults, counted=counted), "plan") for vault in vaults.values()]
    narrow = sum(message[0].numpy().view(np.uint32) for message in messages)
    wide = sum(message[1].numpy().view(np.uint64) for message in messages)
    small, large = scales(len(SITES))
    found = np.asarray(narrow).view(np.int32) / small, np.asarray(wide).view(np.int64) / large
    weights = {site: COUNTS[site] / 800 if counted else 1.0 for site in SITES}
    total = sum(weights.values())
    assert found[1][-1] * 2 / LARGEST_WIDE == pytest.approx(total, abs=1e-8)
    mean = weighted_mean((model(number), weights[site]) for number, site in enumerate(SITES))
    for name, change in (("w", found[0]), ("bn.running_var", found[1][:-1])):
        wanted_sum = total * (mean[name].double() - OLD[name].double())
        assert np.abs(change - wanted_sum.numpy()).max() < 1e-6 * max(1.0, float(OLD[name].abs().max()))


def test_a_single_message_is_uniform_whatever_it_hides(tmp_path: Path) -> None:
    vaults = {site: Vault(tmp_path / site, site, None) for site in SITES[:3]}
    zeros = {"w": torch.zeros(200_000)}
    for vault in vaults.values():
        vault.hold(HELD, 1, zeros, zeros, 10)
    narrow, _ = vaults["blue"].masked(wanted(vaults, counted=False), "plan")
    bytes_seen = np.bincount(np.frombuffer(narrow.numpy().tobytes(), np.uint8), minlength=256)
    expected = bytes_seen.sum() / 256
    statistic = float(((bytes_seen - expected) ** 2 / expected).sum())
    assert chi2.sf(statistic, 255) > 1e-4, "the bytes of a message that hides nothing but zeros"
    assert len(np.unique(narrow.numpy())) > 199_000


def test_two_colluding_sites_leave_the_third_one_hidden_and_every_sum_has_streams_of_its_own(tmp_path: Path) -> None:
    vaults = held(tmp_path)
    first, _ = vaults["amber"].masked(wanted(vaults), "plan")
    second, _ = vaults["amber"].masked(wanted(vaults), "another plan")
    difference = (first - second).double() / 2**31
    assert float(difference.abs().mean()) > 0.3, "nothing of the same model shows in the difference of two messages"


def test_what_was_summed_over_some_sites_is_not_summed_over_others(tmp_path: Path) -> None:
    """The difference of the two sums would be one site's own. A coordinator that says it was interrupted may have the
    step done again, with the same result."""
    vaults = held(tmp_path)
    three = wanted({site: vaults[site] for site in SITES[:3]})
    first, _ = vaults["amber"].masked(wanted(vaults), "plan")
    vaults["amber"].hold(HELD, 1, model(0), OLD, COUNTS["amber"])
    again, _ = vaults["amber"].masked(wanted(vaults), "plan")
    assert torch.equal(first, again)
    for plan in ("plan", "another plan"):
        with pytest.raises(SiteError, match="other sites"):
            vaults["amber"].masked(three, plan)
    vaults["amber"].hold(HELD, 2, model(5), OLD, COUNTS["amber"])
    vaults["amber"].masked(dataclasses.replace(three, round=2), "plan")


def test_the_same_streams_never_hide_two_models(tmp_path: Path) -> None:
    vaults = held(tmp_path)
    asked = wanted(vaults)
    first = vaults["amber"].masked(asked, "plan")
    assert torch.equal(vaults["amber"].masked(asked, "plan")[0], first[0]), "the same again tells nothing new"
    vaults["amber"].hold(HELD, 1, model(7), OLD, 10)
    with pytest.raises(SiteError, match="asked for again"):
        vaults["amber"].masked(asked, "plan")


def test_a_sum_must_belong_to_the_round_and_to_what_is_there(tmp_path: Path) -> None:
    vaults = held(tmp_path)
    for changes in ({"round": 2}, {"largest": 5}, {"held": "other/model"}):
        with pytest.raises(SiteError) as caught:
            vaults["amber"].masked(wanted(vaults, **changes), "plan")
        assert caught.value.code == "site-policy"


def test_keys_of_others_are_none_of_ones_own_nor_unusable(tmp_path: Path) -> None:
    vaults = held(tmp_path)
    keys = {site: vault.public() for site, vault in vaults.items()}
    own, other = keys["amber"], keys["blue"]
    wrong: list[dict[str, Any]] = [
        {**keys, "amber": other},
        {**keys, "blue": own},
        {**keys, "coral": other},
        {**keys, "blue": {"key": "00" * 32}},
        {**keys, "blue": {"key": "zz"}},
        {**keys, "blue": {}},
        {site: key for site, key in keys.items() if site != "amber"},
    ]
    for listed in wrong:
        with pytest.raises(SiteError):
            vaults["amber"].masked(wanted(vaults, keys=listed), "plan")


def test_numbers_beyond_the_range_are_kept_from_every_sum(tmp_path: Path) -> None:
    vault = Vault(tmp_path, "amber", None)
    for value in (9.0, float("nan"), float("inf")):
        with pytest.raises(SiteError, match="too much for a secure sum"):
            vault.hold(HELD, 1, {"w": torch.tensor([value])}, {"w": torch.zeros(1)}, 10)
    assert Layout.of(OLD) == Layout(("w",), ("bn.running_var",))


def test_two_sites_have_the_same_secret_and_the_coordinator_another(tmp_path: Path) -> None:
    one, two, eve = (Vault(tmp_path / name, name, None) for name in ("one", "two", "eve"))
    keys = [bytes.fromhex(vault.public()["key"]) for vault in (one, two)]
    assert pair_key(one._secret(), keys[1], b"x") == pair_key(two._secret(), keys[0], b"x")
    assert pair_key(eve._secret(), keys[0], b"x") != pair_key(one._secret(), keys[1], b"x")
    assert pair_key(one._secret(), keys[1], b"x") != pair_key(one._secret(), keys[1], b"y")


# --- With certificates ----------------------------------------------------------------------------------------------


def issued(name: str, issuer: Any = None, role: str | None = None) -> tuple[Any, Any]:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import rsa
    from cryptography.x509.oid import NameOID

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    parts = [x509.NameAttribute(NameOID.COMMON_NAME, name)]
    parts += [x509.NameAttribute(NameOID.UNSTRUCTURED_NAME, role)] if role else []
    subject = x509.Name(parts)
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(
        issuer[0].subject if issuer else subject,
        subject,
        key.public_key(),
        x509.random_serial_number(),
        now - timedelta(days=1),
        now + timedelta(days=1),
    )
    return builder.sign(issuer[1] if issuer else key, hashes.SHA256()), key


def written(folder: Path, name: str, certificate: Any, key: Any, authority: Any) -> Path:
    from cryptography.hazmat.primitives import serialization as form

    startup = folder / name / "startup"
    startup.mkdir(parents=True)
    plain = form.NoEncryption()
    (startup / "client.crt").write_bytes(certificate.public_bytes(form.Encoding.PEM))
    (startup / "client.key").write_bytes(
        key.private_bytes(form.Encoding.PEM, form.PrivateFormat.TraditionalOpenSSL, plain)
    )
    (startup / "rootCA.pem").write_bytes(authority.public_bytes(form.Encoding.PEM))
    server = {"name": "project", "service": {"target": "coordinator.org:8002"}}
    (startup / "fed_client.json").write_text(json.dumps({"servers": [server], "client": {"fqsn": name}}))
    return folder / name


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Path], Any]]:
    folder, authority = tmp_path_factory.mktemp("kits"), issued("authority")
    kits = {site: written(folder, site, *issued(site, authority), authority[0]) for site in SITES[:3]}
    # What a coordinator has: a certificate as the server, one as a person, and any that it makes itself.
    own = issued("authority")
    kits["coordinator.org"] = written(folder, "coordinator.org", *issued("coordinator.org", authority), authority[0])
    kits["person"] = written(folder, "person", *issued("person", authority, "lead"), authority[0])
    kits["ghost"] = written(folder, "ghost", *issued("ghost", own), own[0])
    yield kits, authority


@pytest.mark.slow
def test_sites_believe_only_keys_that_their_federations_certificates_signed(
    federation: tuple[dict[str, Path], Any], tmp_path: Path
) -> None:
    kits, _ = federation
    vaults = held(tmp_path, SITES[:3], kits)
    keys = {site: vault.public() for site, vault in vaults.items()}
    vaults["amber"].masked(wanted(vaults), "plan")
    others = {
        name: Vault(tmp_path / name, name, kits[name]).public() for name in ("coordinator.org", "person", "ghost")
    }
    fresh = Vault(tmp_path / "fresh", "blue", None).public()
    hostile: list[dict[str, Any]] = [{**keys, name: public} for name, public in others.items()]
    hostile += [
        {**keys, "blue": {**keys["blue"], "key": fresh["key"]}},  # another key under a true signature
        {**keys, "blue": fresh},  # no signature
        {**keys, "blue": others["ghost"]},
        {**keys, "dim": {**keys["blue"], "key": fresh["key"]}},
    ]
    for listed in hostile:
        with pytest.raises(SiteError, match="not signed by a site of this federation"):
            vaults["amber"].masked(wanted(vaults, keys=listed), "plan")


@pytest.mark.slow
def test_a_key_that_was_signed_for_another_run_is_none(federation: tuple[dict[str, Path], Any], tmp_path: Path) -> None:
    kits, _ = federation
    now, before = (
        {site: Vault(tmp_path / site / run / "secure", site, kits[site]) for site in SITES[:3]}
        for run in ("0123abcd", "89abcdef")
    )
    amber, blue = now["amber"], now["blue"]
    old = before["blue"].public()
    amber._require_fair(wanted(now))
    with pytest.raises(SiteError, match="not signed by a site of this federation"):
        amber._require_fair(wanted(now, keys={**{site: vault.public() for site, vault in now.items()}, "blue": old}))
    assert blue.public()["key"] != old["key"]


# --- Runs -------------------------------------------------------------------------------------------------------------


def fit(data: Path, out: Path, **keys: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    from safetensors.torch import load_file

    given = {"method": "fedavg", "target": "dim", "rounds": 2, "batch_size": 8, "workers": 0, "arch": "digits-csac"}
    fedshift.fit(data=data, out=out, **{**given, "policy": {"min_samples": 2}, **keys})
    return load_file(out / "model.safetensors"), json.loads((out / "results.json").read_text())


def test_a_run_ends_in_the_same_model_and_sends_as_much(tiny_data: Path, tmp_path: Path) -> None:
    plain, before = fit(tiny_data, tmp_path / "plain", aggregation="mean", rounds=1)
    secure, after = fit(tiny_data, tmp_path / "secure", secure_aggregation=True, rounds=1)
    assert max(float((plain[name] - secure[name]).abs().max()) for name in plain) < 1e-6
    for direction in ("up", "down"):
        assert after["bytes"][direction] < 1.1 * before["bytes"][direction]
    lines = [json.loads(line) for line in (tmp_path / "secure/sites/blue/ledger.jsonl").read_text().splitlines()]
    left = {line["kind"] for line in lines if line["event"] == "left" and line["values"] > 10}
    assert "masked" in left and "weights" not in left


def test_a_sum_that_a_site_does_not_answer_for_is_lost_and_the_run_goes_on(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Vault.masked

    def masked(self: Vault, wanted: Sum, plan: str) -> Any:
        if self._name == "blue" and wanted.round == 1:
            raise SiteError("site-failed", "gone")
        return real(self, wanted, plan)

    monkeypatch.setattr(Vault, "masked", masked)
    _, results = fit(tiny_data, tmp_path / "run", secure_aggregation=True)
    assert results["counters"]["secure.lost-sums"] == 1


@pytest.mark.parametrize("weight", [0.0, -1.0, -2.0, 5.0])
def test_a_weight_that_is_forged_inside_the_mask_costs_a_round_and_no_more(
    weight: float, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Vault.masked

    def masked(self: Vault, wanted: Sum, plan: str) -> Any:
        narrow, wide = real(self, wanted, plan)
        if self._name == "blue" and wanted.round == 1:  # Adding to a masked message adds to the sum.
            wide[-1] += int((weight - 1) * LARGEST_WIDE / 2 * scales(len(wanted.keys))[1])
        return narrow, wide

    monkeypatch.setattr(Vault, "masked", masked)
    model, results = fit(tiny_data, tmp_path / "run", secure_aggregation=True)
    assert results["counters"]["secure.wrong-sums"] == 1
    assert all(bool(torch.isfinite(value).all()) for value in model.values())


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"method": "copa", "arch": "digits-copa"}, "head of each site by itself"),
        ({"method": "kd3a"}, "model of each site by itself"),
        ({"method": "feddg-ga"}, "model of each site by itself"),
        ({"method": "single-site"}, "does not average"),
        ({"aggregation": "median"}, "use mean"),
        ({"method": "fed-dan", "setting": "multi-adapt", "home": "dim", "target": None}, "set norm=average"),
        ({"compress": "int8"}, "leave out"),
        ({"sources": ["amber", "blue"]}, "fewer than policy.min_sites"),
    ],
)
def test_what_needs_single_values_does_not_begin(
    keys: dict[str, Any], words: str, tiny_data: Path, tmp_path: Path
) -> None:
    if keys.get("method") == "kd3a":
        keys = {**keys, "setting": "adapt"}
    with pytest.raises(FedshiftError, match=words):
        fit(tiny_data, tmp_path / "run", secure_aggregation=True, **keys)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "keys"),
    [
        *((method, {}) for method in ("fedsr", "fedadg", "fedl2r", "fedcmi", "guided-head", "fedlooks")),
        ("fed-dan", {"setting": "multi-adapt", "home": "dim", "target": None, "norm": "average"}),
    ],
)
def test_every_method_that_only_averages_ends_in_the_same_model(
    method: str, keys: dict[str, Any], tiny_data: Path, tmp_path: Path
) -> None:
    plain, secure = (
        fit(tiny_data, tmp_path / name, method=method, rounds=1, aggregation="mean", secure_aggregation=on, **keys)[0]
        for name, on in (("plain", False), ("secure", True))
    )
    floating = [name for name, value in plain.items() if value.is_floating_point()]
    assert max(float((plain[name] - secure[name]).abs().max()) for name in floating) < 1e-6


def test_a_site_may_take_part_in_no_other_run(tiny_data: Path, tmp_path: Path) -> None:
    with pytest.raises(FedshiftError, match="site-policy"):
        fit(tiny_data, tmp_path / "run", policy={"min_samples": 2, "secure_aggregation": True})
    assert not Policy().secure_aggregation
