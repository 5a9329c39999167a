"""python -m tests.gpu.ahead [--few]: compile the host's loops that tests of GPUs compare with, on all cores at once.

A machine with a GPU may be lent for minutes, and has none of them. --few: some, to see that this works.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tests import ahead
from tests.gpu.every_kernel import HOST, MAKERS

SHARES = 16  # of the pairs of dtype and operation


def kernel(name: str) -> None:
    for arguments in MAKERS[name]():
        getattr(HOST, name)(*arguments)


def main() -> None:
    few = sys.argv[1:] == ["--few"]
    reductions = [partial(ahead.reductions, slice(share, None, SHARES)) for share in range(SHARES)]
    kernels = [partial(kernel, name) for name in MAKERS if name not in ("reduce", "reduce_to")]
    work: list[Callable[[], None]]
    work = [reductions[0], kernels[0]] if few else [ahead.verbs, *kernels, *reductions]
    with ProcessPoolExecutor(2 if few else os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        for done in [pool.submit(step) for step in work]:
            done.result()  # raises what its process has raised


if __name__ == "__main__":
    main()
