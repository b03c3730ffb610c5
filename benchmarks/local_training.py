"""A site's local training against a plain loop: torch's DataLoader over JPEG files read with PIL, in float32.

python benchmarks/local_training.py [--quick | --seeds | NETWORK ...] prints one JSON line. Both train the same network
for one pass over the same images in batches of the same size, on one thread. They are two processes, because fedshift
sets up its allocator, and take turns; times are of the processor, and ratios are medians. `loop` has torch's default
layout, `loop channels_last` the faster one. `float32` is what fedshift does by default, `auto` with `precision: auto`.
`kernels` is the share of convolutions, norms, activations and pooling, forward and backward, in fedshift's own time:
what is left is all that a faster loop could save. `two workers` is a federation's round with one worker process over
that with two, in seconds of the clock: of use on a machine that does nothing else. --seeds compares accuracies
instead: FedAvg on built-in digits in both precisions, five seeds.
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
from typing import IO, Any

import numpy as np

FROZEN = ":frozen"
"""After a network's name: its norms keep their statistics, in the loop too, as with pre-trained weights."""
NETWORKS = {
    "mobilenet_v2": (96, 64, 32),
    "mobilenet_v2:frozen": (96, 64, 32),
    "efficientnet_lite0": (96, 64, 32),
    "efficientnet_lite0:frozen": (96, 64, 32),
    "digits-copa": (32, 256, 32),
    "digits-kd3a": (32, 128, 32),
    "digits-csac": (16, 512, 32),
}
"""Network -> side in pixels, images, batch size."""
QUICK = ("mobilenet_v2", "mobilenet_v2:frozen", "digits-copa")
CLASSES = 7
REPEATS = 5
KERNELS = ("convolution", "batch_norm", "hardtanh", "threshold", "relu", "clamp_min", "pool", "addmm", "aten::mm")


def main() -> None:
    given = [word for word in sys.argv[1:] if not word.startswith("--")]
    names = given or (QUICK if "--quick" in sys.argv else tuple(NETWORKS))
    with tempfile.TemporaryDirectory() as folder:
        rows = {name: compare(name, Path(folder) / name) for name in names}
    line: dict[str, Any] = {"benchmark": "local_training", "networks": rows}
    if not given and "--quick" not in sys.argv:
        line["two workers"] = two_workers()
    print(json.dumps(line))


def compare(name: str, folder: Path) -> dict[str, Any]:
    write_images(folder, *NETWORKS[name][:2])
    others = {kind: Child(kind, name, folder) for kind in ("loop", "fedshift")}
    kinds = {
        "loop": ("loop", "default"),
        "loop channels_last": ("loop", "channels_last"),
        "float32": ("fedshift", "float32"),
        "bfloat16": ("fedshift", "bfloat16"),
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(REPEATS + 1):
        for kind, (child, how) in kinds.items():
            found = others[child].ask(how)
            if turn:  # The first pass sets up the kernels.
                seconds[kind].append(found)
    share = others["fedshift"].ask("kernels")
    for child in others.values():
        child.end()
    middle = {kind: statistics.median(found) for kind, found in seconds.items()}
    middle["auto"] = middle["bfloat16"] if middle["bfloat16"] <= 0.9 * middle["float32"] else middle["float32"]
    return {
        "seconds": {kind: round(found, 3) for kind, found in middle.items()},
        "times as fast as the loop": {kind: round(middle["loop"] / middle[kind], 2) for kind in ("float32", "auto")},
        "as the loop in channels_last": {
            kind: round(middle["loop channels_last"] / middle[kind], 2) for kind in ("float32", "auto")
        },
        "kernels": round(share, 2),
    }


def write_images(folder: Path, side: int, count: int) -> None:
    from PIL import Image

    generator = np.random.default_rng(0)
    folder.mkdir()
    for number in range(count):
        small = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        image = Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC)
        image.save(folder / f"{number:04}-{number % CLASSES}.jpg", quality=90)


class Child:
    """A process that trains one pass for each line it reads, and answers with its seconds."""

    def __init__(self, kind: str, name: str, folder: Path) -> None:
        command = [sys.executable, __file__, "--child", kind, name, str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, how: str) -> float:
        writes, reads = self._process.stdin, self._process.stdout
        assert writes is not None and reads is not None
        writes.write(how + "\n")
        writes.flush()
        return float(reads.readline())

    def end(self) -> None:
        stream: IO[str] | None = self._process.stdin
        assert stream is not None
        stream.close()
        self._process.wait()


def child(kind: str, name: str, folder: Path) -> None:
    import torch

    torch.set_num_threads(1)
    one_pass = (the_loop if kind == "loop" else fedshifts)(name, folder)
    for line in sys.stdin:
        started = time.process_time()
        found = one_pass(line.strip())
        print(time.process_time() - started if found is None else found, flush=True)


def the_loop(name: str, folder: Path) -> Callable[[str], float | None]:
    import torch
    from PIL import Image
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, Dataset

    from fedshift.nn.archs import build_network
    from fedshift.nn.taps import norm_layers

    side, _, size = NETWORKS[name]
    files = sorted(folder.glob("*.jpg"))

    class Images(Dataset[tuple[torch.Tensor, int]]):
        def __len__(self) -> int:
            return len(files)

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            with Image.open(files[index]) as image:
                pixels = np.asarray(image.convert("RGB"))
            return torch.from_numpy(pixels.copy()).permute(2, 0, 1).float().div(255), int(files[index].stem[-1])

    nets = {}
    for layout, form in (("default", torch.contiguous_format), ("channels_last", torch.channels_last)):
        nets[layout] = build_network(name.removesuffix(FROZEN), (3, side, side), CLASSES, 0).train()
        nets[layout].to(memory_format=form)  # type: ignore[call-overload]
        for layer in norm_layers(nets[layout]).values() if name.endswith(FROZEN) else ():
            layer.eval()
            # A hook that does nothing: the layer runs by itself, as in a network that torch alone has made.
            layer.register_forward_pre_hook(lambda *_: None)

    def one_pass(how: str) -> None:
        net = nets[how]
        optimizer = torch.optim.SGD(net.parameters(), 0.001, momentum=0.9, weight_decay=5e-4)
        for x, y in DataLoader(Images(), batch_size=size, shuffle=True):
            if how == "channels_last":
                x = x.contiguous(memory_format=torch.channels_last)
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()

    return one_pass


def fedshifts(name: str, folder: Path) -> Callable[[str], float | None]:
    import torch
    from PIL import Image

    from fedshift.data.batches import LabelledData
    from fedshift.data.domain import Split
    from fedshift.functional.losses import cross_entropy
    from fedshift.machine import keep_freed_memory
    from fedshift.methods.local import _Sgd, train_batches, weights_of, with_weights
    from fedshift.nn.archs import build_network
    from fedshift.nn.network import blank_copy
    from fedshift.nn.normalisation import freeze_norms
    from fedshift.rng import Rng

    keep_freed_memory()
    side, _, size = NETWORKS[name]
    files = sorted(folder.glob("*.jpg"))
    images = np.stack([np.asarray(Image.open(file).convert("RGB")) for file in files])
    labels = np.array([int(file.stem[-1]) for file in files])
    data = LabelledData(Split(images, labels), torch.device("cpu"))
    base = build_network(name.removesuffix(FROZEN), (3, side, side), CLASSES, 0)
    if name.endswith(FROZEN):
        freeze_norms(base)
    weights = weights_of(base)

    def one_pass(how: str) -> float | None:
        if how == "kernels":
            return kernel_share(lambda: one_pass("float32"))
        blank = blank_copy(base)
        assert blank is not None
        net = with_weights(blank, weights, torch.device("cpu")).train()
        optimizer = _Sgd(net.parameters(), 0.001, 0.9, weight_decay=5e-4, fused=True)
        batches = data.batches(size, Rng.of(0, 1))
        train_batches(batches, lambda batch: cross_entropy(net(batch.x), batch.y), optimizer, how)
        weights_of(net)
        return None

    return one_pass


def kernel_share(work: Callable[[], Any]) -> float:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        work()
    times = {event.key: event.self_cpu_time_total for event in profiled.key_averages()}
    kernels = sum(spent for key, spent in times.items() if any(part in key for part in KERNELS))
    return kernels / sum(times.values())


def two_workers() -> dict[str, float]:
    """A round of four sites: how many times as fast two worker processes are as one."""
    from fedshift.runs.api import fit
    from fedshift.runs.progress import Silent

    class Watch(Silent):
        def begin(self, rounds: int, done: int, title: str) -> None:
            self.times = [time.perf_counter()]

        def round(self, *_: Any) -> None:
            self.times.append(time.perf_counter())

    ratios = []
    keys: dict[str, Any] = {"dataset": "digits", "target": "photo", "train_per_site": 320, "arch": "digits-copa"}
    for _ in range(REPEATS):
        seconds = {}
        for workers in (1, 2):
            watch = Watch()
            with tempfile.TemporaryDirectory() as folder:
                run = Path(folder) / "run"
                fit("fedavg", out=run, rounds=3, evaluate_every=3, workers=workers, progress=watch, **keys)
            seconds[workers] = watch.times[2] - watch.times[1]
        ratios.append(seconds[1] / seconds[2])
    return {"times as fast as one": round(statistics.median(ratios), 2)}


def accuracies() -> dict[str, list[float]]:
    """Percent right on the unseen domain by precision, for each seed."""
    import torch

    from fedshift.runs.api import fit

    torch.set_num_threads(1)
    keys: dict[str, Any] = {"dataset": "digits", "target": "photo", "rounds": 6, "evaluate_every": 6, "workers": 0}
    found: dict[str, list[float]] = {"float32": [], "bfloat16": []}
    for seed in range(1, 6):
        for precision, scores in found.items():
            with tempfile.TemporaryDirectory() as folder:
                run = Path(folder) / "run"
                done = fit("fedavg", out=run, train_per_site=300, seed=seed, precision=precision, **keys)
            scores.append(round(100 * done.results["accuracy"]["last"], 1))
    return found


if __name__ == "__main__":
    if "--child" in sys.argv:
        child(sys.argv[2], sys.argv[3], Path(sys.argv[4]))
    elif "--seeds" in sys.argv:
        print(json.dumps({"benchmark": "local_training --seeds", "accuracy": accuracies()}))
    else:
        main()
