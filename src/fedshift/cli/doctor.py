"""`fedshift doctor`: one line per check, with what it found and what to do."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import Console


@dataclass(frozen=True)
class Finding:
    """The result of one check. The command fails if a `needed` finding is not `good`."""

    what: str
    good: bool
    text: str
    needed: bool = True


def examine() -> bool:
    """Prints every finding. True if everything needed works."""
    console = Console()
    findings = [finding for check in _CHECKS for finding in check()]
    for finding in findings:
        mark = (
            "[green]ok[/green]  " if finding.good else "[red]FAIL[/red]" if finding.needed else "[yellow]note[/yellow]"
        )
        console.print(f"{mark} {finding.what}: {finding.text}", highlight=False)
    return all(finding.good or not finding.needed for finding in findings)


def _python() -> Iterator[Finding]:
    found = ".".join(map(str, sys.version_info[:3]))
    yield Finding("python", sys.version_info >= (3, 11), f"{found} (3.11 or newer is needed)")


def _packages() -> Iterator[Finding]:
    for name in ("torch", "numpy", "PIL", "sklearn", "safetensors", "pydantic", "yaml", "rich", "matplotlib", "jinja2"):
        try:
            version = getattr(importlib.import_module(name), "__version__", "installed")
            yield Finding(name, True, str(version))
        # A broken binary package can raise anything on import.
        except Exception as error:
            yield Finding(name, False, f"cannot be imported ({type(error).__name__}: {error}); reinstall it")


def _torch_works() -> Iterator[Finding]:
    import torch

    from fedshift.machine import NO_BFLOAT16, emulates_bfloat16

    value = float((torch.ones(4, 4) @ torch.ones(4, 4)).sum())
    yield Finding("torch arithmetic", value == 64.0, f"{torch.get_num_threads()} threads")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none: runs use the CPU"
    slow = emulates_bfloat16()
    yield Finding("bfloat16", not slow, NO_BFLOAT16 if slow else "usable as precision", needed=False)
    yield Finding("cuda", torch.cuda.is_available(), device, needed=False)


def _torchvision() -> Iterator[Finding]:
    """fedshift does not use it, but a build for another torch breaks packages that do."""
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        version = importlib.import_module("torchvision").__version__
        yield Finding("torchvision", True, f"{version} (not used)", needed=False)
    except Exception as error:
        text = f"broken ({type(error).__name__}: {error}); fedshift does not use it, but other packages may fail"
        yield Finding("torchvision", False, text, needed=False)


def _cache() -> Iterator[Finding]:
    from fedshift.files import cache_root

    root = cache_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
        writable = os.access(root, os.W_OK)
    except OSError:
        writable = False
    yield Finding("cache", writable, f"{root} ({'writable' if writable else 'not writable: set FEDSHIFT_CACHE'})")
    if writable:
        free = shutil.disk_usage(root).free / 1e9
        yield Finding(
            "disk", free > 1, f"{free:.1f} GB free for the cache (at least 1 GB is recommended)", needed=False
        )


def _pretrained() -> Iterator[Finding]:
    from fedshift.errors import InputError
    from fedshift.nn.archs import ARCHS
    from fedshift.nn.weights import imagenet_weights

    for arch in (arch for arch in ARCHS.values() if arch.imagenet):
        try:
            imagenet_weights(arch.name)
            yield Finding(f"ImageNet weights of {arch.name}", True, "ready", needed=False)
        except InputError as error:
            yield Finding(f"ImageNet weights of {arch.name}", False, error.message, needed=False)


_CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _python,
    _packages,
    _torch_works,
    _torchvision,
    _cache,
    _pretrained,
)
