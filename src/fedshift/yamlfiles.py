"""YAML as fedshift reads and writes it: plain keys and values, of limited size, without anchors and aliases.

A few lines of aliases can stand for billions of values, and a key that is there twice hides one of its values.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from fedshift.errors import InputError
from fedshift.files import read_bounded

LARGEST = 2**20
"""Bytes of a configuration file."""
DEEPEST = 50
"""Levels of lists and mappings inside each other."""


class YamlError(ValueError):
    """Text that is not plain YAML; the message says why in one line."""


class _PlainLoader(yaml.SafeLoader):
    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "anchor", None) is not None:
            raise YamlError(f"anchors and aliases are not allowed (line {event.start_mark.line + 1})")
        self._depth += 1
        if self._depth > DEEPEST:
            raise YamlError(f"more than {DEEPEST} levels (line {event.start_mark.line + 1})")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        if isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if key.value in seen:
                        raise YamlError(f"the key {key.value!r} is there twice (line {key.start_mark.line + 1})")
                    seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_yaml(text: str) -> Any:
    """What the text holds. Anything that is not plain YAML is a `YamlError`."""
    loader = None
    try:
        loader = _PlainLoader(text)
        return loader.get_single_data()
    except YamlError:
        raise
    except yaml.YAMLError as error:
        raise YamlError(str(error).splitlines()[0]) from error
    except (ValueError, RecursionError, OverflowError) as error:  # A date or number that does not exist.
        raise YamlError(f"a value cannot be read ({error})") from error
    finally:
        if loader is not None:
            loader.dispose()


def read_yaml(path: Path, code: str) -> Any:
    """What a YAML file holds. One that is too large, unreadable or no plain YAML is an error with this code."""
    data = read_bounded(path, LARGEST, code)
    try:
        return load_yaml(data.decode())
    except UnicodeDecodeError as error:
        raise InputError(code, f"{path} is not valid YAML: it is not text in UTF-8") from error
    except YamlError as error:
        raise InputError(code, f"{path} is not valid YAML: {error}") from error


class _PlainDumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def dump_yaml(values: Any) -> str:
    return str(yaml.dump(values, Dumper=_PlainDumper, sort_keys=False, allow_unicode=True))
