"""`fedshift export`: a model for programs that do not have fedshift. What was written is read back and compared."""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import nn

from fedshift.errors import InputError
from fedshift.files import write_atomically
from fedshift.handover.portable import Portable, check_samples, describe, expected, input_name
from fedshift.methods.base import SHARED
from fedshift.runs.api import Run, Select
from fedshift.runs.files.model import SavedModel

Format = Literal["onnx", "torch", "safetensors"]
SUFFIX: Mapping[Format, str] = {"onnx": ".onnx", "torch": ".pt2", "safetensors": ".safetensors"}
TOLERANCE = 1e-4
"""By how much a probability of the exported model may differ from that of `predict`."""
DESCRIPTION = "fedshift"
"""The key of the metadata, in every format, that holds `describe` as JSON."""
_OPSET = 20
_BATCH = 32


@dataclass(frozen=True)
class ExportedModel:
    """A file that was written: whose model, and the largest difference of a probability on so many samples."""

    path: Path
    whose: str
    largest_difference: float
    samples: int
    checked_on: str


def export_model(
    run: Path | str,
    out: Path | str | None = None,
    format: Format = "onnx",
    *,
    site: str | None = None,
    select: Select = "last",
    check: Path | None = None,
) -> list[ExportedModel]:
    """Writes the model of a finished run for other programs and checks that it predicts what `fedshift predict` does.

    A run with a model per client gives one file for each, with the client's name in the file's, unless `site` chooses
    one. `check` is a folder of pictures, or a table, to compare on; by default the run's own data."""
    finished = Run(run)
    saved = finished.model(select)
    file = Path(out) if out is not None else Path("model" + SUFFIX[format])
    need(format)
    if site is not None or len(saved.models) == 1:
        chosen = {finished.choose(saved, site): file}
    else:
        chosen = {
            name: file if name == SHARED else file.with_name(f"{file.stem}-{name}{file.suffix}")
            for name in sorted(saved.models)
        }
    inputs, source = check_samples(finished, saved.header, check)
    made: dict[str, bytes] = {}
    results = []
    for name, path in chosen.items():
        made[name] = _write(saved, name, format, finished.results.get("model_sha256", ""))
        difference = _difference(saved, name, format, made[name], inputs)
        if not difference <= TOLERANCE:  # NaN too.
            raise InputError(
                "export-failed",
                f"the exported model differs from the run's by up to {difference:.2g} in a probability on {len(inputs)}"
                f" samples, more than {TOLERANCE:g}: nothing was written. Try another --format",
            )
        results.append(ExportedModel(path, name or "the shared model", difference, len(inputs), source))
    for name, path in chosen.items():
        write_atomically(path, made[name])
    return results


def need(format: Format) -> None:
    """Refuses a format whose packages are not installed."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if format == "onnx" and missing:
        raise InputError(
            "extra-missing",
            f"--format onnx needs {', '.join(missing)}: pip install 'fedshift[export]'. --format torch needs nothing",
        )


def _write(saved: SavedModel, site: str, format: Format, model_sha256: str) -> bytes:
    described = json.dumps(describe(saved.header, model_sha256))
    if format == "safetensors":
        weights = {key: value.contiguous() for key, value in saved.models[site].items()}
        scales = {"mean": list(saved.header.mean), "std": list(saved.header.std)}
        return save_tensors(weights, {DESCRIPTION: described, "normalisation": json.dumps(scales)})
    try:
        with _quiet():
            program = _program(Portable(saved.network(site), saved.header).eval(), saved)
            if format == "onnx":
                return _onnx_bytes(program, saved, described)
            return _torch_bytes(program, described)
    except InputError:
        raise
    except Exception as error:  # Exporters raise whatever a network's own code leads them to.
        raise InputError(
            "export-failed",
            f"this network cannot be written as {format} ({type(error).__name__}: {str(error).splitlines()[0][:200]})."
            " Try another --format",
        ) from error


def _program(module: nn.Module, saved: SavedModel) -> torch.export.ExportedProgram:
    """The traced module, for any number of samples. What a trace notes of the machine that it was made on is removed:
    paths of source files."""
    shape = saved.header.input_shape
    example = torch.zeros(2, *shape[1:], 3, dtype=torch.uint8) if len(shape) == 3 else torch.zeros(2, *shape)
    count = torch.export.Dim("n", min=1)
    with torch.no_grad():
        program = torch.export.export(module, (example,), dynamic_shapes=({0: count},))
    for node in program.graph.nodes:
        for key in ("stack_trace", "source_fn_stack", "from_node", "nn_module_stack", "torch_fn"):
            node.meta.pop(key, None)
    return program


def _torch_bytes(program: torch.export.ExportedProgram, described: str) -> bytes:
    program.example_inputs = None  # They alone would be pickled.
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={DESCRIPTION: described})
    return buffer.getvalue()


def _onnx_bytes(program: torch.export.ExportedProgram, saved: SavedModel, described: str) -> bytes:
    names = {"input_names": [input_name(saved.header)], "output_names": ["probabilities"]}
    made = torch.onnx.export(program, dynamo=True, opset_version=_OPSET, verbose=False, **names)  # type: ignore[arg-type]
    assert made is not None
    model: Any = made.model_proto
    graph = model.graph
    for part in (model, graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        del part.metadata_props[:]
        part.doc_string = ""
    entry = model.metadata_props.add()
    entry.key, entry.value = DESCRIPTION, described
    return bytes(model.SerializeToString())


def _difference(saved: SavedModel, site: str, format: Format, data: bytes, inputs: NDArray[Any]) -> float:
    """The largest difference of a probability between what was written and what `predict` says."""
    wanted, answer = expected(saved.network(site), saved.header, inputs), _opened(saved, format, data)
    found = np.concatenate([answer(part) for part in np.array_split(inputs, -(-len(inputs) // _BATCH))])
    return float(np.abs(found - wanted).max())


def _opened(saved: SavedModel, format: Format, data: bytes) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """Inputs to probabilities by the exported bytes, opened as a program without fedshift would."""
    if format == "onnx":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 3
        session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        name = input_name(saved.header)
        return lambda inputs: np.asarray(session.run(None, {name: inputs})[0])
    module: nn.Module
    if format == "torch":
        with _quiet():
            module = torch.export.load(io.BytesIO(data)).module()
    else:
        module = Portable(SavedModel(saved.header, {SHARED: load_tensors(data)}).network(), saved.header)
    return lambda inputs: module(torch.from_numpy(inputs)).detach().numpy()


@contextmanager
def _quiet() -> Iterator[None]:
    """Exporters talk of packages that are not needed, and warn of their own calls."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
