"""Every COMMLIB_* setting, in one table: name, type, default, meaning.

Settings are read from the environment once, at `commlib.init`, and must be the same on all ranks unless noted.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from commlib.errors import UsageError


def _setting(default: Any, meaning: str, choices: tuple[str, ...] = (), *, least: float = 0) -> Any:
    return field(default=default, metadata={"meaning": meaning, "choices": choices, "least": least})


@dataclass(frozen=True, slots=True)
class Config:
    """The settings. Field `x` is read from the environment variable `COMMLIB_X`."""

    check: str = _setting(
        "auto",
        "compare the calls of all ranks: 'auto' always within a node, in a group's first calls across nodes, "
        "and whenever a wait is long; 'always'; 'never'",
        ("auto", "always", "never"),
    )
    check_first: int = _setting(64, "calls of a group across nodes that 'auto' compares before any data is sent")
    stall_warning: float = _setting(60.0, "seconds of waiting after which the late ranks are named in the log")
    timeout: float = _setting(0.0, "seconds after which a wait raises StallError; 0 waits for ever")
    exit_timeout: float = _setting(5.0, "seconds that shutdown and interpreter exit wait for work in flight")
    node_path: bool = _setting(True, "use shared memory between the ranks of a node")
    slot_kib: int = _setting(
        512, "KiB of each rank's two shared slots through which ordinary arrays are reduced", least=1
    )
    native_kib: int = _setting(
        1024, "KiB of each piece in which a large array is handed to MPI's own all-reduce", least=1
    )
    spins: int = _setting(
        -1, "polls before a waiting rank yields its core; -1 chooses by cores per rank (per rank)", least=-1
    )
    tuning_file: str = _setting(
        "",
        "file of measured times ('commlib tune' writes it) that algorithms are chosen by; empty is "
        "commlib/tuning.json in the user's cache folder, unless other users can change it, 'none' is the cost model "
        "alone (read by rank 0)",
    )
    fusion_mib: int = _setting(
        64,
        "MiB up to which small named tensors that are ready together are reduced as one array between nodes "
        "(on a node 1 at most)",
        least=1,
    )
    known_names: int = _setting(
        4096, "names of operations that ranks remember, to ask for them again by a bit each", least=1
    )
    log_level: str = _setting(
        "warning", "level of the 'commlib' logger (per rank)", ("debug", "info", "warning", "error")
    )


_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def _parse(name: str, kind: str, choices: tuple[str, ...], least: float, text: str) -> Any:
    try:
        if kind == "bool":
            return {**dict.fromkeys(_TRUE, True), **dict.fromkeys(_FALSE, False)}[text.lower()]
        if kind in ("int", "float"):
            value = {"int": int, "float": float}[kind](text)
            if not least <= value < math.inf:
                raise ValueError
            return value
    except (KeyError, ValueError):
        bound = "" if kind == "bool" else f" of at least {least}"
        raise UsageError(f"environment variable {name}={text!r}: expected {kind}{bound}") from None
    if choices and text not in choices:
        raise UsageError(f"environment variable {name}={text!r}: expected one of {', '.join(choices)}")
    return text


def load(environment: Mapping[str, str] = os.environ) -> Config:
    """Return the settings of `environment`. Raises UsageError for a bad value or an unknown COMMLIB_ name."""
    known = {f"COMMLIB_{f.name.upper()}": f for f in fields(Config)}
    given = {name: text for name, text in environment.items() if name.startswith("COMMLIB_")}
    if unknown := sorted(given.keys() - known.keys()):
        raise UsageError(f"unknown setting {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    values = {
        known[name].name: _parse(
            name, str(known[name].type), known[name].metadata["choices"], known[name].metadata["least"], text
        )
        for name, text in given.items()
    }
    return Config(**values)
