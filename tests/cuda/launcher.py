"""HostLauncher: run CUDA kernels in host memory, at once."""

from __future__ import annotations

from typing import Any

import numpy as np

from commlib.dtypes import Array
from commlib.kernels.cuda.launcher import Defines
from commlib.kernels.cuda.sources import expand_source
from tests.cuda import build


class HostLauncher:
    """See `commlib.kernels.cuda.launcher.KernelLauncher`. most_workers: few, so that loops have several rounds.

    lanes: of each worker: 1, or 32 as on a GPU.
    """

    lanes = 1

    def __init__(self, most_workers: int = 7) -> None:
        self.most_workers = most_workers
        self.launches: list[str] = []

    def launch(self, source: str, kernel: str, defines: Defines, workers: int, *args: Any) -> None:
        if workers == 0:
            return
        self.launches.append(kernel)
        built = build.library(expand_source(source), build.as_options(defines), self.lanes)
        build.run(built, kernel, min(workers, self.most_workers), [np.asarray(arg) for arg in args])

    def scratch(self, nbytes: int) -> Array:
        return np.full(nbytes, 0xA5, np.uint8)

    def read(self, memory: Array, dtype: Any) -> Array:
        values: Array = memory.view(dtype).copy()
        return values
