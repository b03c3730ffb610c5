"""A round of KD3A against a plain loop that does the same, on one thread.

python benchmarks/kd3a_round.py [ARCH ...] prints one JSON line. The loop is this project's own, written as research
code is: torch's DataLoader over image files read with PIL, float32, the default layout, all models in memory, a vote
in each batch of the target. It does what `kd3a.preset=reference` does (the authors' choices: teachers in train mode,
the highest probability votes, mixup, no BatchNorm MMD) with four sources, one pass of each over its images. Both run
in processes of their own and take turns; times are of the processor, ratios are medians. `auto` is `precision: auto`.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ARCHS = ("digits-kd3a",)
IMAGES, BATCH, REPEATS = 128, 32, 5
KEYS: dict[str, Any] = {
    "method": "kd3a", "dataset": "digits", "setting": "adapt", "target": "photo", "train_per_site": IMAGES,
    "workers": 0, "batch_size": BATCH, "kd3a": {"preset": "reference"},
}  # fmt: skip
KINDS = {"loop": ("loop", ""), "float32": ("fedshift", "float32"), "bfloat16": ("fedshift", "bfloat16")}


def main() -> None:
    networks = {arch: compare(arch) for arch in sys.argv[1:] or ARCHS}
    print(json.dumps({"benchmark": "kd3a_round", "networks": networks}))


def compare(arch: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        processes = {kind: start(kind, arch, folder) for kind in KINDS}
        seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for turn in range(REPEATS + 1):
            for kind, process in processes.items():
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write("\n")
                process.stdin.flush()
                found = float(process.stdout.readline())
                if turn:
                    seconds[kind].append(found)
        for process in processes.values():
            process.communicate()
    middle = {kind: statistics.median(found) for kind, found in seconds.items()}
    middle["auto"] = middle["bfloat16"] if middle["bfloat16"] <= 0.9 * middle["float32"] else middle["float32"]
    ratios = {kind: round(middle["loop"] / middle[kind], 2) for kind in ("float32", "auto")}
    return {"seconds": {kind: round(found, 2) for kind, found in middle.items()}, "times as fast": ratios}


def start(kind: str, arch: str, folder: str) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--child", *KINDS[kind], arch, str(Path(folder) / kind)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def child(kind: str, precision: str, arch: str, folder: Path) -> None:
    import torch

    torch.set_num_threads(1)
    one_round = (the_loop if kind == "loop" else fedshifts)(arch, precision or "float32", folder)
    for _ in sys.stdin:
        started = time.process_time()
        one_round()
        print(time.process_time() - started, flush=True)


def fedshifts(arch: str, precision: str, folder: Path) -> Callable[[], None]:
    from fedshift.federation import codec
    from fedshift.methods.kd3a.kd3a import KD3A
    from fedshift.runs.config import make_config
    from fedshift.runs.planning import base_network, open_federation, prepare

    ready = prepare(make_config({**KEYS, "arch": arch, "precision": precision, "rounds": REPEATS + 1}))
    fed = open_federation(ready, folder)
    method = KD3A(codec.restore(KD3A.hyper_type, dict(ready.plan.hyper)))
    state = method.init(base_network(ready)[0], fed)

    def one_round() -> None:
        nonlocal state
        fed.begin(fed.round + 1)
        state = method.round(state, fed)

    return one_round


def the_loop(arch: str, precision: str, folder: Path) -> Callable[[], None]:
    import copy

    import torch
    from PIL import Image
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, Dataset

    from fedshift.nn.archs import build_network
    from fedshift.runs.config import make_config
    from fedshift.runs.planning import prepare

    dataset = prepare(make_config({**KEYS, "arch": arch})).dataset

    class Files(Dataset[tuple[torch.Tensor, int]]):
        def __init__(self, domain: str) -> None:
            split = dataset.load(domain).train.take(np.arange(IMAGES))
            assert split.labels is not None
            self.labels, self.files = split.labels, []
            for number, pixels in enumerate(split.inputs):
                self.files.append(folder / f"{domain}-{number}.png")
                Image.fromarray(pixels).save(self.files[-1])

        def __len__(self) -> int:
            return len(self.files)

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            with Image.open(self.files[index]) as image:
                pixels = np.asarray(image.convert("RGB")).copy()
            return torch.from_numpy(pixels).permute(2, 0, 1).float().div(255), int(self.labels[index])

    folder.mkdir()
    sources = [name for name in dataset.domains if name != "photo"]
    data = {name: DataLoader(Files(name), batch_size=BATCH, shuffle=True) for name in (*sources, "photo")}
    first = build_network(arch, dataset.input_shape, len(dataset.classes), 0).train()
    nets = {name: copy.deepcopy(first) for name in data}
    optimizers = {
        name: torch.optim.SGD(net.parameters(), 0.01, momentum=0.9, weight_decay=5e-4) for name, net in nets.items()
    }

    def step(name: str, loss: torch.Tensor) -> None:
        optimizers[name].zero_grad()
        loss.backward()
        optimizers[name].step()

    def one_round() -> None:
        for name in sources:
            for x, y in data[name]:
                step(name, F.cross_entropy(nets[name](x), y))
        for x, _ in data["photo"]:
            with torch.no_grad():
                said = torch.stack([nets[name](x).softmax(1) for name in sources])
            confident = said.max(2).values > 0.9
            votes = torch.zeros_like(said[0])
            for own, counts in zip(said, confident, strict=True):
                top = torch.zeros_like(votes).scatter_(1, own.argmax(1, keepdim=True), own.max(1, keepdim=True).values)
                votes += top * counts[:, None]
            labels = F.one_hot(votes.argmax(1), votes.shape[1]).float()
            lam, order = float(np.random.beta(2, 2)), torch.randperm(len(x))
            mixed, target = lam * x + (1 - lam) * x[order], lam * labels + (1 - lam) * labels[order]
            log_q = nets["photo"](mixed).log_softmax(1)
            step("photo", (-(target * log_q).sum(1) * confident.any(0)).mean())
        states = [net.state_dict() for net in nets.values()]
        mean = {
            key: torch.stack([state[key].float() for state in states]).mean(0).to(value.dtype)
            for key, value in states[0].items()
        }
        for net in nets.values():
            net.load_state_dict(mean)

    return one_round


if __name__ == "__main__":
    if "--child" in sys.argv:
        child(sys.argv[2], sys.argv[3], sys.argv[4], Path(sys.argv[5]))
    else:
        main()
