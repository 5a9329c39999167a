"""Bodies of tests: the ordered verbs on TensorFlow's tensors of a device, eagerly."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import tensorflow as tf

import commlib_tensorflow as ct
from commlib.dtypes import NUMPY
from tests.bodies import verb_gradients


def of(rank: int, dtype: str, rows: int = 6) -> Any:
    """Return the tensor of a rank: small whole numbers, exact in every dtype."""
    numbers = np.arange(rows * 3).reshape(rows, 3) % 5 + rank
    return (numbers % 2 if dtype == "bool" else numbers).astype(NUMPY[dtype])


def check(place: Any, got: Any, expected: Any, given: Any = None) -> None:
    """Compare values, and check that a result is on its input's device, which TensorFlow may have chosen."""
    assert isinstance(got, tf.Tensor)
    assert given is None or expected.size == 0 or got.backing_device == given.backing_device
    assert got.dtype == tf.as_dtype(expected.dtype)
    np.testing.assert_array_equal(got.numpy().astype(complex), expected.astype(complex))


def total(parts: list[Any]) -> Any:
    stacked = np.stack(parts)
    if stacked.dtype == bool:
        return stacked.any(0)
    wide = stacked.astype(np.float32) if stacked.dtype == ml_dtypes.bfloat16 else stacked
    return wide.sum(0).astype(stacked.dtype)


def verbs(comm: Any, place: Any, dtype: str) -> None:
    """Run all verbs, blocking and not; inputs do not change."""
    size, rank, last = comm.size, comm.rank, comm.size - 1
    parts = [of(peer, dtype) for peer in range(size)]
    mine = place.put(parts[rank])
    assert dtype != "float32" or place.device in mine.backing_device
    for got in (ct.all_reduce(mine, ranks=comm), ct.all_reduce_async(mine, ranks=comm).wait()):
        check(place, got, total(parts), mine)
    for got in (ct.reduce(mine, root=last, ranks=comm), ct.reduce_async(mine, root=last, ranks=comm).wait()):
        if rank == last:
            check(place, got, total(parts), mine)
    rows = np.array_split(total(parts), size)[rank]
    for got in (ct.reduce_scatter(mine, ranks=comm), ct.reduce_scatter_async(mine, ranks=comm).wait()):
        check(place, got, rows, mine)
    for got in (ct.broadcast(mine, root=last, ranks=comm), ct.broadcast_async(mine, root=last, ranks=comm).wait()):
        check(place, got, parts[last], mine)
    for got in (ct.all_gather(mine, ranks=comm), ct.all_gather_async(mine, ranks=comm).wait()):
        check(place, got, np.concatenate(parts), mine)
    uneven = np.concatenate([part[: peer + 1] for peer, part in enumerate(parts)])
    for got in (
        ct.all_gather_v(mine[: rank + 1], ranks=comm),
        ct.all_gather_v_async(mine[: rank + 1], ranks=comm).wait(),
    ):
        check(place, got, uneven)
    gathered = ct.gather(mine, last, ranks=comm)
    if rank == last:
        check(place, gathered, np.concatenate(parts))
    whole = place.put(np.concatenate(parts)) if rank == last else None
    check(place, ct.scatter(whole, last, ranks=comm), parts[rank])
    pieces = place.put(np.concatenate([of(rank + 10 * peer, dtype, 2) for peer in range(size)]))
    check(place, ct.all_to_all(pieces, ranks=comm), np.concatenate([of(p + 10 * rank, dtype, 2) for p in range(size)]))
    splits = [(rank + peer) % 2 for peer in range(size)]
    rows = np.concatenate([of(peer, dtype, (rank + peer) % 2) for peer in range(size)])
    came = np.concatenate([of(rank, dtype, (peer + rank) % 2) for peer in range(size)])
    for asked in (splits, place.put(np.array(splits))):
        got, counts = ct.all_to_all_v(place.put(rows), asked, ranks=comm)
        check(place, got, came)
        assert counts.numpy().tolist() == splits
    right, left = (rank + 1) % size, (rank - 1) % size
    check(place, ct.send_recv(mine, right, mine, left, ranks=comm), parts[left])
    if size > 1 and rank < 2:
        if rank == 0:
            ct.send(mine, 1, 5, ranks=comm)
        else:
            check(place, ct.recv(mine, 0, 5, ranks=comm), parts[0])
    check(place, mine, parts[rank])


def gradients(comm: Any, place: Any) -> None:
    """The ordered verbs have the gradients of one process."""
    for case in verb_gradients.CASES.values():

        def differentiate(x: Any, weights: Any, case: verb_gradients.Case = case) -> tuple[Any, Any, Any]:
            tensor = place.put(x)
            with tf.GradientTape() as outer:
                outer.watch(tensor)
                with tf.GradientTape() as inner:
                    inner.watch(tensor)
                    result = case.call(ct, tensor, comm, lambda shape: place.put(np.zeros(shape)))
                    loss = tf.reduce_sum(place.put(weights) * tf.square(result))
                gradient = inner.gradient(loss, tensor)
                squares = tf.reduce_sum(tf.square(gradient))
            return result.numpy(), gradient.numpy(), outer.gradient(squares, tensor).numpy()

        verb_gradients.check(case, comm, differentiate)


def results_in_use(comm: Any, place: Any) -> None:
    """Values that TensorFlow computes from a result stay correct after the result is freed and others arrive."""
    kept = []
    for step in range(20):
        x = place.put(np.full((300, 100), comm.rank + step, np.float32))
        kept.append(tf.reduce_sum(ct.all_reduce(x, ranks=comm) * 2.0))
    base = comm.size * (comm.size - 1) / 2
    np.testing.assert_array_equal(
        [float(value) for value in kept], [60_000.0 * (base + comm.size * step) for step in range(20)]
    )


def inputs_in_use(comm: Any, place: Any) -> None:
    """TensorFlow reuses an input's memory at once, even if it waits for no result of the call."""
    root = comm.size - 1
    totals = []
    for step in range(20):
        x = place.put(np.full((300, 100), comm.rank + step, np.float32))
        totals.append(ct.reduce(x, root=root, ranks=comm))
        del x
        place.put(np.full((300, 100), -1, np.float32))
    np.testing.assert_array_equal(ct.all_reduce(place.put(np.ones(3)), ranks=comm), np.full(3, comm.size))
    base = comm.size * (comm.size - 1) / 2
    for step, total in enumerate(totals):
        assert (total is None) == (comm.rank != root)
        if total is not None:
            np.testing.assert_array_equal(total, np.full((300, 100), base + comm.size * step, np.float32))
