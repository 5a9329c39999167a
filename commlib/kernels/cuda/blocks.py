"""Blocks: copy runs of elements from one order of dimensions to another. See blocks.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from commlib.kernels.cuda.arguments import at
from commlib.kernels.cuda.launcher import Launcher
from commlib.kernels.protocol import Blocks

_FIELDS = ("rows", "columns", "run", "from_row", "from_column", "to_row", "to_column")
_Blocks = np.dtype([(name, "u8") for name in _FIELDS])

_SHORT, _THREADS = 32, 32
"""Elements of a run below which threads copy single ones; and how many of these are a worker."""


def copy_blocks(launcher: Launcher, source: Any, target: Any, blocks: Blocks) -> None:
    """Copy blocks of elements of any dtype, the same on both sides."""
    item = int(source.dtype.itemsize)
    units, defines = max(1, item // 8), {"ELEMENT": f"u{8 * min(item, 8)}"}
    told = np.zeros((), _Blocks)
    for name in _FIELDS:
        told[name] = getattr(blocks, name) * (units if name not in ("rows", "columns") else 1)
    count, length = blocks.rows * blocks.columns, blocks.run * units
    if length < _SHORT:
        kernel, workers = "copy_elements", -(-count * length // _THREADS)
    else:
        kernel, workers = "copy_blocks", count
    launcher.launch("blocks.cu", kernel, defines, workers, told, at(source), at(target))
