"""The page of `fedshift audit leakage`: what was found at which size, and pictures beside their originals."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedshift.audit.leakage.study import Leakage, same_messages
from fedshift.files import write_atomically
from fedshift.report.page import templates

FILE = "leakage.json"
NONE = "nothing found"


def write_leakage(found: Leakage, folder: Path) -> Path:
    """Adds a study to leakage.json, replacing one of the same kind, and writes leakage.html and leakage.md anew."""
    kept = [one for one in read_leakage(folder) if study_key(one) != study_key(found.plain())]
    study = found.plain()
    for case, plain in zip(found.cases, study["cases"], strict=True):
        best = [f for f in case.findings if f.rebuilt is not None]
        shown = max(best, key=lambda one: one.numbers["ssim_best"], default=None)
        if shown is not None and shown.originals is not None and shown.rebuilt is not None:
            plain["picture"] = {"attack": shown.attack, "png": _png(shown.originals, shown.rebuilt)}
    studies = [*kept, study]
    write_atomically(folder / FILE, (json.dumps(studies, indent=1) + "\n").encode())
    write_atomically(folder / "leakage.md", table(studies).encode())
    page = folder / "leakage.html"
    write_atomically(page, templates().get_template("leakage.html").render(studies=studies).encode())
    return page


def read_leakage(folder: Path) -> list[dict[str, Any]]:
    path = folder / FILE
    return list(json.loads(path.read_text())) if path.exists() else []


def table(studies: Sequence[dict[str, Any]]) -> str:
    """Markdown: a line for each method, network and protection, a column for each size, the worst verdict in a cell."""
    sizes = sorted({case["size"] for study in studies for case in study["cases"]})
    head = ["method", "network, protection", *(f"{size} sample{'s' if size > 1 else ''}" for size in sizes)]
    rows = []
    for study in studies:
        cells = {case["size"]: _cell(case) for case in study["cases"]}
        names = ", ".join([study["method"], *same_messages(study["method"])])
        rows.append([names, f"{study['arch']}, {study['protection']}", *(cells.get(size, "") for size in sizes)])
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _cell(case: dict[str, Any]) -> str:
    if not case["findings"]:
        return "not tried" if case["left_out"] else NONE
    by: dict[str, Any] = next((one for one in case["findings"] if one["verdict"] == case["verdict"]), {})
    told = str(case["verdict"])
    if told == "rebuilt":
        told += f" (SSIM {by['ssim_best']:.2f})"
    elif told == "recognised":
        told += f" ({100 * by['recognised']:.0f} %)"
    elif told == "members told":
        told += f" (AUC {by['auc']:.2f})"
    if case["verdict"] != NONE and by:
        told += f" by {by['attack']}"
    return told + ("; refused by default" if case["by_default"] else "")


def study_key(study: dict[str, Any]) -> tuple[str, ...]:
    """What a study is of: another one of the same replaces it."""
    return tuple(str(study[name]) for name in ("method", "dataset", "site", "arch", "protection"))


def _png(originals: Tensor, rebuilt: Tensor) -> str:
    """Originals above what was rebuilt, enlarged, as base64."""
    from PIL import Image

    rows = [torch.nn.functional.pad(part, (1, 1, 1, 1), value=1.0) for part in (originals, rebuilt)]
    strip = torch.cat([torch.cat(list(part), dim=2) for part in rows], dim=1).clamp(0, 1)
    pixels = (strip.permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()
    scale = max(1, 96 // originals.shape[-1])
    image = Image.fromarray(pixels).resize((pixels.shape[1] * scale, pixels.shape[0] * scale), Image.Resampling.NEAREST)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()
