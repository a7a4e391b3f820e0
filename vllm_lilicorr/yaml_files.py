"""Reads a YAML file that a user wrote: every mistake in it is one sentence, a key that stands twice among them."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from .errors import UserError


def read_yaml(path: str | Path, example: str) -> dict[str, Any]:
    """Return the mapping a YAML file holds; `example` names a file of its kind in errors.

    Raises UserError when the file is missing, no YAML, no mapping, or has a key twice in one section.
    """
    path = Path(path)
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file; give a configuration such as {example}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as text ({error})") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise UserError(f"{path}: is not valid YAML{where}: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: must hold sections of keys, got {type(values).__name__}")
    return values


class _UniqueKeys(yaml.SafeLoader):
    """PyYAML silently keeps the last of two equal keys; a config in which one of them does nothing is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=deep)
            if not isinstance(key, Hashable):
                continue  # the loader itself refuses it
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key '{key}' stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)
