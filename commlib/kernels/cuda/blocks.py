"""Block copies: copy runs of elements to another order of dimensions. See blocks.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from commlib.kernels.cuda.arguments import pointer_to
from commlib.kernels.cuda.launcher import LaunchedKernels
from commlib.kernels.protocol import BlockLayout

_FIELDS = ("rows", "columns", "run", "from_row", "from_column", "to_row", "to_column")
_Blocks = np.dtype([(name, "u8") for name in _FIELDS])

_SHORT, _THREADS = 32, 32
"""Length of runs below which threads copy single elements, and the number of elements per worker."""


class BlockKernels(LaunchedKernels):
    def copy_blocks(self, source: Any, target: Any, blocks: BlockLayout) -> None:
        item = int(source.dtype.itemsize)
        units, defines = max(1, item // 8), {"ELEMENT": f"u{8 * min(item, 8)}"}
        layout = np.zeros((), _Blocks)
        for name in _FIELDS:
            layout[name] = getattr(blocks, name) * (units if name not in ("rows", "columns") else 1)
        count, length = blocks.rows * blocks.columns, blocks.run * units
        if length < _SHORT:
            kernel, workers = "copy_elements", -(-count * length // _THREADS)
        else:
            kernel, workers = "copy_blocks", count
        self._launch("blocks.cu", kernel, defines, workers, layout, pointer_to(source), pointer_to(target))
