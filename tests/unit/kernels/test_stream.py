"""Copies past the caches."""

from __future__ import annotations

import numba as nb
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.kernels.host.stream import stream_copy

MARGIN = 70


@settings(deadline=None)  # the first call compiles
@given(nbytes=st.integers(0, 1000), target_shift=st.integers(0, 64), source_shift=st.integers(0, 64))
def test_exactly_the_given_bytes_are_copied(nbytes: int, target_shift: int, source_shift: int) -> None:
    source = np.random.default_rng(nbytes).integers(1, 256, nbytes + MARGIN, np.uint8)
    target = np.zeros(nbytes + 2 * MARGIN, np.uint8)
    stream_copy(target.ctypes.data + target_shift, source.ctypes.data + source_shift, nbytes)
    copied = target[target_shift : target_shift + nbytes]
    assert (copied == source[source_shift : source_shift + nbytes]).all()
    assert np.count_nonzero(target) == nbytes


def test_stores_bypass_the_caches() -> None:
    """Otherwise the kernel would be a slow memcpy, unnoticed."""
    fresh = nb.njit(stream_copy.py_func)  # code from the disk cache has no assembly
    fresh.compile((nb.int64, nb.int64, nb.int64))
    (assembly,) = fresh.inspect_asm().values()
    assert any(f"\t{instruction}" in assembly for instruction in ("movnt", "vmovnt", "stnp"))
