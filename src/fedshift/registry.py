"""Things by name: those that come with fedshift, those that a script registers, those that installed packages offer.

A name may also be a path, `package.module:object`. Importing a module runs its code, and names come from configuration
files, model files and, at a site, from the coordinator. So a path is followed only if the user has named its module:
`allow_import`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar, cast

from fedshift.errors import InputError, nearest

T = TypeVar("T")

_allowed: set[str] = set()
_only_allowed = False


class Registry(Mapping[str, T], Generic[T]):
    """A mapping from names to values of one kind, such as methods.

    `builtin` has values, or texts `module:attribute` that are imported when they are first asked for. Packages offer
    more through the entry point group `fedshift.<group>`; they cannot take a built-in name. `accept` makes a value of
    what scripts, packages and paths provide, and refuses what cannot be one.
    """

    def __init__(
        self,
        kind: str,
        group: str,
        builtin: Mapping[str, T | str],
        accept: Callable[[str, Any], T] = lambda name, value: cast(T, value),
    ) -> None:
        self.kind = kind
        self.group = f"fedshift.{group}"
        self._builtin = dict(builtin)
        self._accept = accept
        self._values: dict[str, T] = {}
        self._offered: dict[str, EntryPoint] | None = None

    def register(self, name: str, value: Any) -> T:
        """Adds a value, or replaces one that was registered before under this name (as a notebook does)."""
        if name in self._builtin:
            raise InputError("config-value", f"fedshift already has a {self.kind} {name!r}: choose another name")
        self._values[name] = self._accept(name, value)
        return self._values[name]

    def find(self, name: str) -> T:
        """The value of this name or path; otherwise an error that suggests the nearest name."""
        if name not in self:
            if ":" in name:
                require_allowed(name.partition(":")[0], f"{self.kind} {name!r}")
                return self.register(name, load_object(name))
            raise InputError("unknown-name", f"There is no {self.kind} {name!r}. {nearest(name, self)}")
        return self[name]

    @property
    def builtin(self) -> tuple[str, ...]:
        """The names that come with fedshift."""
        return tuple(self._builtin)

    def registered(self) -> list[T]:
        """The values that are loaded already."""
        return list(self._values.values())

    def __getitem__(self, name: str) -> T:
        if name in self._values:
            return self._values[name]
        if name in self._builtin:
            value = self._builtin[name]
            self._values[name] = load_object(value) if isinstance(value, str) else value
            return self._values[name]
        point = self._entry_points()[name]
        if _only_allowed:
            require_allowed(point.value.partition(":")[0], f"{self.kind} {name!r}")
        return self.register(name, point.load())

    def __contains__(self, name: object) -> bool:
        return name in self._builtin or name in self._values or name in self._entry_points()

    def __iter__(self) -> Iterator[str]:
        return iter({**self._builtin, **self._values, **self._entry_points()})

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _entry_points(self) -> dict[str, EntryPoint]:
        if self._offered is None:
            found = entry_points(group=self.group)
            self._offered = {point.name: point for point in found if point.name not in self._builtin}
        return self._offered


def load_object(path: str) -> Any:
    """What `package.module:name` refers to."""
    module, _, name = path.partition(":")
    found = import_module(module)
    if not hasattr(found, name):
        known = [key for key in vars(found) if not key.startswith("_")]
        raise InputError("unknown-name", f"module {module!r} has no {name!r}. {nearest(name, known)}")
    return getattr(found, name)


def import_module(name: str) -> Any:
    """The module. One that does not exist is the user's spelling; an error inside it is raised as it is."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
        hint = f"write {name.removesuffix('.py')!r}" if name.endswith(".py") else "is its package installed?"
        raise InputError("unknown-name", f"there is no module {name!r} to import: {hint}") from error


def allow_import(module: str) -> None:
    """Names that refer to `module`, or to a module inside it, may be followed from now on: its code may run here."""
    _allowed.add(module)


def names_may_be_added() -> bool:
    """Whether code of the user may have registered names, or may still do so."""
    return bool(_allowed)


def allow_only(modules: Iterable[str]) -> None:
    """From now on in this process, nothing but fedshift itself and these modules is imported for a name: neither paths
    nor what installed packages offer. They are imported here, so that what they register is known."""
    global _only_allowed
    _only_allowed = True
    _allowed.clear()
    for module in modules:
        allow_import(module)
        import_module(module)


def require_allowed(module: str, what: str) -> None:
    """Refuses code that the user has not named."""
    parents = {".".join(module.split(".")[: n + 1]) for n in range(module.count(".") + 1)}
    if not parents & _allowed:
        raise InputError(
            "code-not-allowed",
            f"{what} is code in the module {module!r}, which nobody here has allowed: if you trust it, name it with"
            f" --import {module} (in Python: fedshift.allow_import({module!r}); at a site: `imports` in its policy)",
        )
