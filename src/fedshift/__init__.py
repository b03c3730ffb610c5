"""fedshift: train models across sites that may not share data and whose data look different."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedshift._version import __version__

if TYPE_CHECKING:
    from fedshift.bench.api import benchmark
    from fedshift.bench.auto import choose_method
    from fedshift.bench.own import compare_methods
    from fedshift.handover.export import export_model
    from fedshift.registry import allow_import
    from fedshift.runs.api import Run, fit

__all__ = ["Run", "__version__", "allow_import", "benchmark", "choose_method", "compare_methods", "export_model", "fit"]


def __getattr__(name: str) -> Any:
    """Loads torch only when something that needs it is used."""
    if name in ("Run", "fit"):
        from fedshift.runs import api

        return getattr(api, name)
    if name == "benchmark":
        from fedshift.bench.api import benchmark

        return benchmark
    if name == "choose_method":
        from fedshift.bench.auto import choose_method

        return choose_method
    if name == "compare_methods":
        from fedshift.bench.own import compare_methods

        return compare_methods
    if name == "export_model":
        from fedshift.handover.export import export_model

        return export_model
    if name == "allow_import":
        from fedshift.registry import allow_import

        return allow_import
    raise AttributeError(f"module 'fedshift' has no attribute {name!r}")
