"""One training loop's compressed reductions, on the host or on a device, with the same bits as results."""

from __future__ import annotations

from typing import Any

import numpy as np

from commlib.compress import CODECS, SCHEMES, scheme_of
from commlib.compress.gradients import GradientCompression
from commlib.compress.scheme import BucketPart
from commlib.devices.arrays import as_contiguous
from tests.late import LATE, LateArray

COMPRESSIONS = [name for name in (*CODECS, *SCHEMES) if name != "auto"]
PARTS = [BucketPart("weight", 0, (60, 40)), BucketPart("bias", 2416, (61,)), BucketPart("embedding", 2480, (1100,))]
PLACES = np.concatenate([np.arange(part.start, part.stop) for part in PARTS])  # the gaps may hold anything
FLAGS = 3584
STEPS = 4
BROKEN = 2  # the step in which the last rank's gradient is not finite


def gradient(rank: int, step: int, size: int) -> Any:
    """Return a rank's values and flags in a step."""
    values = np.zeros(FLAGS + 16, np.float32)
    values[:FLAGS] = np.random.default_rng(100 * rank + step).standard_normal(FLAGS)
    values[FLAGS + rank] = 1
    if step == BROKEN and rank == size - 1:
        values[7] = np.inf
    return values


def train(comm: Any, name: str, *, within_node: bool, on_device: bool) -> tuple[Any, ...]:
    """Return the results of some steps: the values, the flags, whether they are finite, the bytes sent, the state."""
    compression = GradientCompression(comm, scheme_of(name), within_node=within_node)
    array = comm.empty(FLAGS + 16, device=LATE) if on_device else comm.empty(FLAGS + 16)
    plan = compression.reduction("bucket", as_contiguous(array, "train"), PARTS, FLAGS, "mean")
    results = []
    for step in range(STEPS):
        values = gradient(comm.rank, step, comm.size)
        if isinstance(array, LateArray):
            LATE.copy(as_contiguous(array, "train"), as_contiguous(LATE.put(values), "train"))
        else:
            array[:] = values
        if step % 2:
            plan.start().wait()
        else:
            plan()
        compression.end_step()
        after = array.numpy() if isinstance(array, LateArray) else array.copy()
        results.append((after[PLACES], after[FLAGS:] > 0, plan.finite, plan.sent_bytes))
    state = compression.state()
    compression.move()
    recreated = compression.reduction("bucket", as_contiguous(array, "train"), PARTS, FLAGS, "mean")
    assert_same(compression.state(), state)
    del recreated
    return results, state


def assert_same(ours: Any, theirs: Any, near: float = 0.0) -> None:
    """Compare nested results: to the last bit, or within a tolerance."""
    if isinstance(ours, dict):
        assert list(ours) == list(theirs)
        ours, theirs = list(ours.values()), list(theirs.values())
    if isinstance(ours, list | tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other, near)
        return
    if near:
        np.testing.assert_allclose(ours, theirs, rtol=near, atol=near)
    else:
        np.testing.assert_array_equal(ours, theirs)


def check(comm: Any, name: str, *, within_node: bool = True) -> None:
    """Train twice, on the host and on the late device, and compare.

    PowerSGD and RandomK add by all-reduces. If the device's take another path than the host's, three numbers or more
    may be added in another order.
    """
    host = train(comm, name, within_node=within_node, on_device=False)
    on_late = train(comm, name, within_node=within_node, on_device=True)
    finite = [step[2] for step in host[0]]
    assert finite == [step != BROKEN for step in range(STEPS)]
    assert list(np.flatnonzero(host[0][0][1])) == list(range(comm.size))
    by_other_paths = comm.size > 2 and name in ("powersgd", "randomk") and comm.group.transport.accepts("late")
    assert_same(on_late, host, 1e-4 if by_other_paths else 0.0)
