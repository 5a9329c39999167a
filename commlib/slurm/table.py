"""Table: read a job from a TOML file; its keys are the names of the options.

partition = "gpu"
nodes = 4
modules = ["openmpi", "cuda"]
command = "python train.py --epochs 10"

[env]
NCCL_DEBUG = "WARN"
"""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from commlib.arguments import nearest
from commlib.errors import UsageError
from commlib.slurm.job import Job, option_name

# The expected value, by the annotation of its field: its type, the type of its items, and a description.
_KINDS: dict[str, tuple[type, type, str]] = {
    "str": (str, str, 'text, such as "1"'),
    "int": (int, int, "a whole number"),
    "bool": (bool, bool, "true or false"),
    "tuple[str, ...]": (list, str, 'a list of texts, such as ["a", "b"]'),
    "Mapping[str, str]": (dict, str, 'a table of texts, such as NAME = "value"'),
}
_NUMBERS_TOO = ("gpus_per_node", "time")  # text that may be all digits, so a number is accepted


def read(path: Path) -> dict[str, Any]:
    """Return the values in a file, by field of Job. Raises UsageError with the file and the key."""
    try:
        document = tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from None
    return parse_document(document, str(path))


def parse_document(document: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the values of a document, by field of Job. where: its name in errors. Raises UsageError."""
    types = {item.name: str(item.type).removesuffix(" | None") for item in fields(Job) if item.name != "output"}
    values = {}
    for key, value in document.items():
        name = key.replace("-", "_")
        if name not in types:
            near = nearest(name, types)
            hint = f"did you mean {option_name(near)}?" if near else f"expected {', '.join(map(option_name, types))}"
            raise UsageError(f"{where}: unknown key {key!r}: {hint}")
        if name in values:
            raise UsageError(f"{where}: {option_name(name)} is given twice, with - and with _")
        values[name] = _checked(name, types[name], value, f"{where}: {key} = {value!r}")
    return values


def _checked(name: str, annotation: str, value: Any, what: str) -> Any:
    if name == "command" and isinstance(value, str):
        return tuple(_words(value, what))
    if name in _NUMBERS_TOO and type(value) is int:
        return str(value)
    kind, item_kind, expected = _KINDS[annotation]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if type(value) is not kind or any(type(item) is not item_kind for item in items):
        raise UsageError(f"{what}: expected {expected}")
    return tuple(value) if isinstance(value, list) else value


def _words(text: str, what: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{what}: {error}") from None
