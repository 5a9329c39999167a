"""Trace lines: the running line of the user's code, and whether this package's code is what runs."""

from __future__ import annotations

from pathlib import Path

import torch

import commlib
from commlib.tensor_parallel.recording import running_line, runs_within

_TORCH = tuple(f"{folder}/" for folder in torch.__path__)
_OURS = tuple(f"{folder}/" for folder in (*commlib.__path__, Path(__file__).parents[1]))
_TRACING = tuple(str(Path(__file__).with_name(name)) for name in ("tracing.py", "_trace_"))


def user_line() -> str:
    """Return the running line of the user's code, as file:line."""
    return running_line((*_TORCH, *_OURS))


def is_own_call() -> bool:
    """Return whether this package's code, other than the tracing itself, calls PyTorch now."""
    return runs_within(_OURS, (*_TORCH, *_TRACING))
