"""A site's side of secure aggregation: what it keeps back, and how it masks it so that only sums can be read.

Every two sites agree on a secret (X25519) of which the coordinator knows both public halves and nothing else. From it
and from everything that the sum is about, HKDF makes a key, and that a stream of numbers which one of the two adds to
its model and the other subtracts (K. Bonawitz et al.: Practical Secure Aggregation for Privacy-Preserving Machine
Learning. CCS 2017, Section 4.0.1). In whole numbers modulo 2^32 or 2^64 a message with one unknown stream in it is
uniform: it tells nothing. In the sum over all these sites the streams cancel.

There are no shares of secrets with which sums could be saved when a site drops out in between: such a sum is lost, and
the next round begins from the model before (federation/secure.py).
"""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshift.errors import FedshiftError, InputError, SiteError
from fedshift.federation import codec
from fedshift.federation.budget import read_key
from fedshift.federation.engines.nvflare.kits import SiteKit
from fedshift.federation.sealed import read_tensor_file, unseal, write_sealed
from fedshift.files import write_atomically
from fedshift.functional.averaging import check_same_layout

_PURPOSE = b"fedshift secure aggregation 1"
LARGEST, LARGEST_WIDE = 8.0, 2.0**30
"""Of a number's change in a round, and of a BatchNorm statistic's."""
_WIDE = ("running_mean", "running_var")


@dataclass(frozen=True)
class Layout:
    """Which numbers of a model are summed, in order: those that are trained in 32 bits, BatchNorm statistics in 64."""

    narrow: tuple[str, ...]
    wide: tuple[str, ...]

    @classmethod
    def of(cls, model: Mapping[str, Tensor]) -> Layout:
        floating = sorted(name for name, value in model.items() if value.is_floating_point())
        wide = tuple(name for name in floating if name.endswith(_WIDE))
        return cls(tuple(name for name in floating if name not in wide), wide)


def scales(sites: int) -> tuple[float, float]:
    """What numbers are multiplied by before they are rounded, so that no sum over sites leaves 32 or 64 bits."""
    return (2.0**31 - sites) / (sites * LARGEST), (2.0**62 - sites) / (sites * LARGEST_WIDE)


def flat(model: Mapping[str, Tensor], names: Sequence[str]) -> NDArray[np.float64]:
    parts = [model[name].detach().double().flatten().numpy() for name in names]
    return np.concatenate(parts) if parts else np.zeros(0)


@dataclass(frozen=True)
class Sum:
    """What a sum is about: the same at all sites or the streams do not cancel. `keys` has each site's public half;
    `counted` says whether sites count by their samples, of which the largest has `largest`."""

    round: int
    held: str
    keys: Mapping[str, Mapping[str, Any]]
    counted: bool
    largest: int

    def digest(self, plan: str) -> bytes:
        keys = {site: about.get("key") for site, about in self.keys.items()}
        told = [plan, self.round, self.held, sorted(keys.items()), self.counted, self.largest]
        return hashlib.sha256(json.dumps(told).encode()).digest()


class Vault:
    """A site's half of a run's keys, and what it keeps back until a sum is asked for. `kit`: where the certificate and
    key of its federation are; without one, public keys are believed as they come."""

    def __init__(self, folder: Path, name: str, kit: Path | None) -> None:
        self._folder, self._name, self._kit = folder, name, kit

    def public(self) -> dict[str, Any]:
        """The public half of the site's key for this run, signed if there is something to sign with."""
        key = _public_of(self._secret()).hex()
        return {"key": key} if self._kit is None else {"key": key, **_signed(self._kit, self._message(self._name, key))}

    def hold(self, held: str, round: int, model: Mapping[str, Tensor], old: Mapping[str, Tensor], count: int) -> None:
        """Keeps back the change from `old` to `model`, made of `count` samples."""
        check_same_layout(old, model)
        layout = Layout.of(model)
        narrow, wide = (flat(model, names) - flat(old, names) for names in (layout.narrow, layout.wide))
        for change, most in ((narrow, LARGEST), (wide, LARGEST_WIDE)):
            if not np.isfinite(change).all() or np.abs(change).max(initial=0) > most:
                raise SiteError("site-failed", f"a number changed by more than {most:g}, too much for a secure sum")
        # The last wide number stands for the weight.
        wide = np.append(wide, LARGEST_WIDE / 2)
        tree = {"narrow": torch.from_numpy(narrow), "wide": torch.from_numpy(wide), "count": count, "round": round}
        write_sealed(self._file(held), tree, {"held": held})

    def masked(self, wanted: Sum, plan: str) -> tuple[Tensor, Tensor]:
        """What is held for this sum, weighted, rounded and masked. The last wide number is the weight."""
        mine = self._require_fair(wanted)
        try:
            held, _ = unseal(read_tensor_file(self._file(wanted.held)))
        except FedshiftError as error:
            raise SiteError("site-policy", "a sum was asked for before the step that makes its parts") from error
        if held["round"] != wanted.round or (wanted.counted and held["count"] > wanted.largest):
            raise SiteError("site-policy", "a sum was asked for that does not belong to this round")
        weight = held["count"] / wanted.largest if wanted.counted else 1.0
        small, large = scales(len(wanted.keys))
        narrow = np.rint(weight * held["narrow"].numpy() * small).astype(np.int64).astype(np.uint32)
        wide = np.rint(weight * held["wide"].numpy() * large).astype(np.int64).astype(np.uint64)
        about = wanted.digest(plan)
        self._use_once(about, narrow.tobytes() + wide.tobytes())
        self._keep_group(wanted)
        for site, public in sorted(wanted.keys.items()):
            if site == self._name:
                continue
            first = stream(pair_key(mine, bytes.fromhex(public["key"]), about), narrow.nbytes + wide.nbytes)
            own = np.frombuffer(first[: narrow.nbytes], "<u4"), np.frombuffer(first[narrow.nbytes :], "<u8")
            if self._name < site:
                narrow, wide = narrow + own[0], wide + own[1]
            else:
                narrow, wide = narrow - own[0], wide - own[1]
        return torch.from_numpy(narrow.view(np.int32)), torch.from_numpy(wide.view(np.int64))

    def _require_fair(self, wanted: Sum) -> bytes:
        """The site's secret, once the others' keys are theirs."""
        mine = self._secret()
        if wanted.keys.get(self._name, {}).get("key") != _public_of(mine).hex():
            raise SiteError("site-policy", "the list of public keys has another one for this site")
        seen = set()
        for site, public in wanted.keys.items():
            key = public.get("key")
            if type(key) is not str or len(key) != 64 or key in seen:
                raise SiteError("site-policy", f"the public key of {site!r} is none, or that of another site")
            seen.add(key)
            if self._kit is not None and site != self._name:
                _require_signed(self._kit, site, self._message(site, key), public)
        return mine

    def _use_once(self, about: bytes, content: bytes) -> None:
        """The same streams never hide two different models: their difference would be open."""
        path, digest = self._folder / f"{about.hex()}.used", hashlib.sha256(content).hexdigest()
        if path.exists() and path.read_text() != digest:
            raise SiteError("site-policy", "the same sum was asked for again, and this site would answer otherwise now")
        write_atomically(path, digest.encode())

    def _keep_group(self, wanted: Sum) -> None:
        """What was in a sum over some sites of a round is in no sum over others: the difference of two sums would be
        that of the sites. A run that is resumed loses a sum by it if other sites are there than before."""
        about = hashlib.sha256(json.dumps([wanted.held, wanted.round]).encode()).hexdigest()
        path, group = self._folder / f"{about}.group", json.dumps(sorted(wanted.keys))
        if path.exists() and path.read_text() != group:
            raise SiteError("site-policy", "in this round, a sum over other sites has been answered")
        write_atomically(path, group.encode())

    def _message(self, site: str, key: str) -> bytes:
        """What a site's signature says: whose key it is, and for which run, whose name that of its folder is. One of an
        earlier run, whose secret may have been stolen since, is none."""
        return b"\n".join((_PURPOSE, self._folder.parent.name.encode(), site.encode(), key.encode()))

    def _secret(self) -> bytes:
        return read_key(self._folder / "key")

    def _file(self, held: str) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder / f"{hashlib.sha256(held.encode()).hexdigest()[:32]}.safetensors"


def _public_of(secret: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def pair_key(secret: bytes, public: bytes, about: bytes) -> bytes:
    """What two sites have in common for one sum."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    try:
        shared = X25519PrivateKey.from_private_bytes(secret).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:  # A point of small order: the result would be known to all.
        raise SiteError("site-policy", "a public key is not usable") from error
    return HKDF(hashes.SHA256(), 32, salt=None, info=_PURPOSE + about).derive(shared)


def stream(key: bytes, size: int) -> bytes:
    """So many bytes of ChaCha20. A key is used for one stream only, so its nonce is 0."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    return Cipher(ChaCha20(key, bytes(16)), None).encryptor().update(bytes(size))


def _signed(kit: Path, message: bytes) -> dict[str, list[str]]:
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

    own = SiteKit.read(kit)
    key: Any = load_pem_private_key(own.key.read_bytes(), None)
    signature = key.sign(message, _padding(), SHA256())
    certificate = x509.load_pem_x509_certificate(own.certificate.read_bytes()).public_bytes(Encoding.DER)
    return {"certificate": _as_names(certificate), "signature": _as_names(signature)}


def _as_names(data: bytes) -> list[str]:
    """Bytes as texts of the length that facts may have."""
    return textwrap.wrap(data.hex(), 128)


def _require_signed(kit: Path, site: str, message: bytes, public: Mapping[str, Any]) -> None:
    """Refuses a key that is not signed by a certificate of the site's own federation with that site's name."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.x509.oid import NameOID

    own = SiteKit.read(kit)
    try:
        authority = x509.load_pem_x509_certificate(own.authority.read_bytes())
        certificate = x509.load_der_x509_certificate(bytes.fromhex("".join(public["certificate"])))
        certificate.verify_directly_issued_by(authority)
        names = [part.value for part in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        roles = certificate.subject.get_attributes_for_oid(NameOID.UNSTRUCTURED_NAME)
        is_valid = certificate.not_valid_before_utc <= datetime.now(UTC) <= certificate.not_valid_after_utc
        # People have roles; the server has the coordinator's name.
        if names != [site] or roles or site == own.host or not is_valid:
            raise ValueError("a certificate of somebody else")
        key: Any = certificate.public_key()
        key.verify(bytes.fromhex("".join(public["signature"])), message, _padding(), SHA256())
    except (ValueError, TypeError, KeyError, AttributeError, InvalidSignature) as error:
        raise SiteError(
            "site-policy", f"the public key of {site!r} is not signed by a site of this federation: nothing leaves"
        ) from error


def _padding() -> Any:
    from cryptography.hazmat.primitives.asymmetric import padding
    from cryptography.hazmat.primitives.hashes import SHA256

    return padding.PSS(padding.MGF1(SHA256()), padding.PSS.MAX_LENGTH)


def require_cryptography() -> None:
    try:
        import cryptography.hazmat.primitives.asymmetric.x25519  # noqa: F401
    except ImportError as error:
        raise InputError(
            "engine-missing", "secure_aggregation takes the package cryptography: pip install 'fedshift[secagg]'"
        ) from error


def plan_digest(plan: Any) -> str:
    return codec.sha256(json.dumps(codec.plain(plan), sort_keys=True).encode())
