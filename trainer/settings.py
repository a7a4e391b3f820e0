"""YAML into frozen typed objects: every key known, every value of its declared type, every error one sentence.

A settings class is a frozen dataclass whose fields are bool, int, float, str, Literal[...], tuple[X, ...], X | None,
or another settings class. Ranges that a type cannot say stand in `__post_init__`, which raises `Invalid(field, problem)`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

import yaml

from vllm_lilicorr.errors import UserError, nearest

T = TypeVar("T")


class Invalid(ValueError):
    """A value whose type is right and whose range is not; `parse` turns it into a sentence that names file and key."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field, self.problem = field, problem


def require(condition: bool, field: str, problem: str) -> None:
    """Raise `Invalid` unless `condition` holds."""
    if not condition:
        raise Invalid(field, problem)


def apply_overrides(values: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """Return `values` with every "key.sub=value" of the command line set; the value is read as YAML."""
    merged = json.loads(json.dumps(values))
    for override in overrides:
        path, separator, text = override.partition("=")
        if not separator or not path or path.startswith("-"):
            raise UserError(f"override '{override}': must have the form key.sub=value, such as run.seed=1")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            raise UserError(f"override '{override}': '{text}' is not a valid YAML value; quote it") from None
        *parents, last = path.split(".")
        section = merged
        for depth, key in enumerate(parents):
            if section.get(key) is None:
                section[key] = {}
            if not isinstance(section[key], dict):
                raise UserError(f"override '{override}': {'.'.join(parents[: depth + 1])} is a value, not a section")
            section = section[key]
        section[last] = value
    return merged


def parse(kind: type[T], values: Any, source: str, prefix: str = "") -> T:
    """Return `values` as an object of the settings class `kind`; `source` and `prefix` place it in errors.

    Raises UserError, one sentence naming file and key, on an unknown key (with the nearest known one), a missing key
    without a default, a wrong type, or a value out of range.
    """
    if not isinstance(values, Mapping):
        raise UserError(f"{source}: {prefix.rstrip('.') or 'the file'} must be a section of keys, got {_show(values)}")
    known = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(kind)
    for key in values:
        if key not in known:
            raise UserError(f"{source}: {prefix}{key} is no known key{nearest(str(key), known)}")
    arguments = {}
    for name, field in known.items():
        if name in values:
            arguments[name] = _convert(hints[name], values[name], source, f"{prefix}{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            if dataclasses.is_dataclass(hints[name]):
                arguments[name] = parse(hints[name], {}, source, f"{prefix}{name}.")
            else:
                raise UserError(f"{source}: {prefix}{name} is missing and has no default; add it")
    try:
        return kind(**arguments)
    except Invalid as error:
        raise UserError(f"{source}: {prefix}{error.field} {error.problem}") from None


def _convert(hint: Any, value: Any, source: str, path: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        return None if value is None else _convert(options[0], value, source, path)
    if dataclasses.is_dataclass(hint):
        return parse(hint, {} if value is None else value, source, f"{path}.")  # type: ignore[arg-type]
    if origin is typing.Literal:
        options = list(typing.get_args(hint))
        if value not in options:
            known = ", ".join(map(str, options))
            raise UserError(
                f"{source}: {path} must be one of {known}, got {_show(value)}{nearest(str(value), map(str, options))}"
            )
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise UserError(f"{source}: {path} must be a list, got {_show(value)}")
        return tuple(_convert(typing.get_args(hint)[0], item, source, f"{path}[{i}]") for i, item in enumerate(value))
    if hint is float and isinstance(value, str):
        try:
            value = float(value)  # YAML 1.1 reads 6e-4, which has no dot, as text
        except ValueError:
            pass
    accepted = (int, float) if hint is float else (hint,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
        raise UserError(f"{source}: {path} must be {_NAMES[hint]}, got {_show(value)}")
    if hint is float and not math.isfinite(value):
        raise UserError(f"{source}: {path} must be a finite number, got {value}")
    return float(value) if hint is float else value


_NAMES = {int: "an integer", float: "a number", str: "text", bool: "true or false"}


def _show(value: Any) -> str:
    return json.dumps(value, default=str)


def to_dict(settings: Any) -> dict[str, Any]:
    """Return a settings object as plain values, such as JSON and YAML hold."""
    return json.loads(json.dumps(dataclasses.asdict(settings)))


def to_yaml(settings: Any) -> str:
    """Return a settings object as YAML text; reading it gives the same object."""
    return yaml.safe_dump(to_dict(settings), sort_keys=False)


def digest(values: Any) -> str:
    """Return 16 hex digits that name a plain value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
