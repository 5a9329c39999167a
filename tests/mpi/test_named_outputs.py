"""Named operations with outputs that do not fit, works without a wait, and late disagreements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from commlib import horovod as hvd
from commlib.errors import MismatchError, UsageError

pytestmark = pytest.mark.any_ranks


@pytest.fixture(autouse=True)
def _running(comm: Any) -> None:
    hvd.init()


def read_only(x: Any) -> Any:
    x = x.copy()
    x.flags.writeable = False
    return x


X = np.ones(100)
BAD: dict[str, tuple[str, Callable[[], Any]]] = {
    "short": (r"output has shape \(10,\)", lambda: np.zeros(1000)[:10]),
    "dtype": ("dtype float32; its input has", lambda: np.zeros(100, "f4")),
    "read-only": ("is read-only", lambda: read_only(X)),
    "strided": ("is not contiguous", lambda: np.zeros(200)[::2]),
}


@pytest.mark.parametrize("case", BAD)
def test_an_output_that_does_not_fit_is_refused_at_once(comm: Any, case: str) -> None:
    """Fused with others it was written as if it fitted; alone, it put the ranks out of step."""
    match, make = BAD[case]
    calls = [
        lambda out: hvd.start_allreduce([X], [out], "a", op=hvd.Sum),
        lambda out: hvd.start_compressed_allreduce([X], [out], "c", compression="int8"),
    ]
    if case == "read-only":
        calls.append(lambda out: hvd.start_broadcast([out], 0, "b"))
    for call in calls:
        if comm.rank == comm.size - 1:
            with pytest.raises(UsageError, match=match):
                call(make())
        call(X.copy()).wait()


def test_an_operation_without_a_wait_keeps_its_arrays(comm: Any) -> None:
    """Arrays that only the operation references are neither freed nor reused before it has run."""
    rank, size = comm.rank, comm.size
    for step in range(2 * size):
        works = []
        for length in (3, 1000, 40_000, 300_000):
            x = np.full(length, float(step + rank))
            out = np.empty(length)
            work = hvd.start_allreduce([x], [out], f"dropped {length}", op=hvd.Sum)
            if rank != step % size:
                works.append(work)
            del x, out, work
            poison = [np.full(length, -7.0) for _ in range(4)]
        for work in works:
            assert (work.wait()[0] == size * step + size * (size - 1) // 2).all()
        del poison
        hvd.start_barrier().wait()


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("what", ["shape", "dtype", "op", "root", "verb", "number of tensors", "prescale_factor"])
def test_ranks_that_disagree_late(comm: Any, what: str) -> None:
    """The name has a bit, and is requested among others; each rank in turn requests something else."""

    def start(odd: bool) -> Any:
        dtype = "f4" if odd and what == "dtype" else "f8"
        x = np.ones((2, 4) if odd and what == "shape" else (4, 2), dtype)
        xs = [x] * (3 if odd and what == "number of tensors" else 2)
        if what == "root":
            return hvd.start_broadcast([x], int(odd), "late")
        if what == "verb" and odd:
            return hvd.start_allgather([x], "late")
        scale = 2.0 if odd and what == "prescale_factor" else 1.0
        op = hvd.Max if odd and what == "op" else hvd.Sum
        return hvd.start_allreduce(xs, [x.copy() for x in xs], "late", op=op, prescale_factor=scale)

    for odd_rank in range(comm.size):
        for call in range(30):
            odd = call in (20, 21)
            works = []
            for number in range(6):
                if number == 3:
                    late = start(odd and comm.rank == odd_rank)
                x = np.full(5, float(number))
                works.append(hvd.start_allreduce([x], [np.empty(5)], f"other {number}", op=hvd.Sum))
            if odd:
                with pytest.raises(MismatchError, match=f"'late': rank .* the ranks disagree: (.*; )?{what} is"):
                    late.wait()
            else:
                late.wait()
            assert [work.wait()[0][0] for work in works] == [comm.size * number for number in range(6)]
