"""Adasum: add gradients of ranks that are orthogonal, and average gradients that are parallel.

    adasum(a, b) = (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b

Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021. It is applied pairwise to ranks whose
numbers differ in one bit, lowest bit first. It takes log2(size) exchanges of the full array, so a rank sends log2(size)
times the bytes of the array. Beyond the largest power of two, rank p + i is first combined with rank i.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from commlib.dtypes import Array


def combine(a: Array, b: Array) -> Array:
    """Return adasum(a, b) of two float64 vectors. A vector of zeros does not change the other."""
    dot, aa, bb = float(a @ b), float(a @ a), float(b @ b)
    first = 1 - dot / (2 * aa) if aa else 1.0
    second = 1 - dot / (2 * bb) if bb else 1.0
    result: Array = first * a + second * b
    return result


def adasum(comm: Any, array: Array) -> None:
    """Combine a contiguous 1-D array of floats of all ranks in place. Every rank gets the same bits.

    Arithmetic is in float64 for every dtype. Collective.
    """
    mine = array.astype(np.float64)
    power = 1 << (comm.size.bit_length() - 1)
    extra = comm.size - power
    if comm.rank >= power:
        comm.send(mine, comm.rank - power)
        comm.recv(mine, comm.rank - power)
    else:
        theirs = np.empty_like(mine)
        if comm.rank < extra:
            comm.recv(theirs, comm.rank + power)
            mine = combine(mine, theirs)
        bit = 1
        while bit < power:
            peer = comm.rank ^ bit
            comm.send_recv(mine, peer, theirs, peer)
            mine = combine(mine, theirs) if comm.rank < peer else combine(theirs, mine)
            bit *= 2
        if comm.rank < extra:
            comm.send(mine, comm.rank + power)
    with np.errstate(over="ignore", invalid="ignore"):
        array[...] = mine.astype(array.dtype)
