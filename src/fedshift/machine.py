"""How this process asks for memory, and which number format this processor computes fast."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

import torch

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3  # M_... of malloc.h
MEGABYTE = 1 << 20

NO_BFLOAT16 = "this processor emulates it, which is several times slower than float32"


@cache
def keep_freed_memory() -> bool:
    """Lets the allocator hold on to what tensors free, where it is glibc's; says whether it does.

    A training step frees its activations and asks for the same again in the next step. By default glibc gives large
    blocks back to the system each time, and clearing the new pages took a fifth of a step of the digit nets
    (benchmarks/allocator.py). The price: a process keeps its peak of small and middle-sized blocks until it ends.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another libc
        return False
    # 32 MB is the most that glibc takes as mmap threshold; larger blocks still come and go as they like.
    settings = {MMAP_THRESHOLD: 32 * MEGABYTE, TRIM_THRESHOLD: 2047 * MEGABYTE, TOP_PAD: 64 * MEGABYTE}
    return all(mallopt(name, value) == 1 for name, value in settings.items())


@cache
def has_accelerator() -> bool:
    """Whether torch sees a device beside the CPU."""
    return bool(torch.cuda.device_count()) or torch.backends.mps.is_available() or torch.xpu.is_available()


def emulates_bfloat16() -> bool:
    """Whether this processor has no instructions for bfloat16 at all: a digit net then trained nine times as long as in
    float32. Others may be slow too; of AVX2 alone it is sure."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2"
