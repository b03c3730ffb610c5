"""What secure aggregation costs: seconds and bytes of a round's sum, with and without masks, in one process.

    python benchmarks/secure_aggregation.py [--numbers 100000] [--sites 4 20 100]

Times are ratios within one run: sites' work (one key exchange and one stream per peer) and the coordinator's sum.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from fedshift.federation import codec
from fedshift.federation.masking import Sum, Vault, scales
from fedshift.functional.averaging import weighted_mean


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--numbers", type=int, default=100_000)
    parser.add_argument("--sites", type=int, nargs="+", default=[4, 20, 100])
    given = parser.parse_args()
    old = {"w": torch.randn(given.numbers)}
    print("sites  bytes up, masked / plain  seconds of a site  of the coordinator, masked / plain  largest error")
    for count in given.sites:
        names = [f"site{number:03d}" for number in range(count)]
        models = [{"w": old["w"] + 0.01 * torch.randn(given.numbers)} for _ in names]
        with tempfile.TemporaryDirectory() as folder:
            vaults = {name: Vault(Path(folder) / name, name, None) for name in names}
            for vault, model in zip(vaults.values(), models, strict=True):
                vault.hold("step/model", 1, model, old, 1)
            wanted = Sum(1, "step/model", {name: vault.public() for name, vault in vaults.items()}, False, 1)
            began = time.perf_counter()
            messages = [vault.masked(wanted, "plan") for vault in vaults.values()]
            of_site = (time.perf_counter() - began) / count
        began = time.perf_counter()
        total = np.zeros(given.numbers, np.uint32)
        for narrow, _ in messages:
            total += narrow.numpy().view(np.uint32)
        found = old["w"].double() + torch.from_numpy(total.view(np.int32) / scales(count)[0] / count)
        masked = time.perf_counter() - began
        began = time.perf_counter()
        mean = weighted_mean((model, 1.0) for model in models)
        plain = time.perf_counter() - began
        exact = sum(model["w"].double() for model in models) / count
        sizes = [len(codec.pack(tree)) for tree in ({"narrow": messages[0][0], "wide": messages[0][1]}, models[0])]
        error = float((found - exact).abs().max())
        assert mean["w"].shape == found.shape
        print(
            f"{count:5d}  {sizes[0]:,} / {sizes[1]:,} ({sizes[0] / sizes[1]:.3f})  {of_site:.4f}"
            f"  {masked:.4f} / {plain:.4f}  {error:.1e}"
        )


if __name__ == "__main__":
    main()
