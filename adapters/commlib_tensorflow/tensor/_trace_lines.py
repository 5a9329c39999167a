"""Trace lines: the lines of the user's code that run, or that have made an operation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import commlib
from commlib.tensor_parallel.recording import running_line

_OURS = Path(__file__).parent.parent
PACKAGES = ("<", *(str(Path(module.__file__ or "").parent) for module in (keras, tf, commlib)), str(_OURS))
"""Folders of code that is not the user's."""


def user_line() -> str:
    """Return the running line of the user's code, as file:line."""
    return running_line(PACKAGES)


def line_of(op: Any) -> str:
    """Return the line of user code that has made an operation, as file:line."""
    lines = (f"{one.filename}:{one.lineno}" for one in reversed(op.traceback) if not one.filename.startswith(PACKAGES))
    return next(lines, "")
