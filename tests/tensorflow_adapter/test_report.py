"""Reports of tapes and optimizers show the cost of a step."""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import commlib_tensorflow as hvd
from commlib_tensorflow.gradients import TensorReducer
from commlib_tensorflow.optimizer import DistributedOptimizer
from tests.tensorflow_adapter.oracle import MODES, in_mode

COUNT = 1000


def ring_bytes(comm: Any, nbytes: int) -> int:
    sent: int = 2 * (comm.size - 1) * nbytes // comm.size
    return sent


def of_buckets(comm: Any, reducer: Any) -> int:
    """Return the bytes that an all-reduce of each bucket sends, with padding and flags."""
    return sum(ring_bytes(comm, bucket.nbytes) for bucket in reducer.reducers[0].buckets)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("overlap", [False, True])
def test_reports_add_up_to_the_statistics(comm: Any, mode: str, overlap: bool) -> None:
    reducer = TensorReducer(f"report {mode} {overlap}", groups=2, overlap=overlap)

    @tf.autograph.experimental.do_not_convert
    def reduce(one: Any, two: Any) -> Any:
        return reducer([one, two], ["one", "two"])

    run = in_mode(mode, reduce)
    assert reducer.report is None
    reports: list[Any] = []
    for _ in range(3):
        time.sleep(0.01)
        run(tf.ones(COUNT), tf.ones(COUNT))
        reports.append(reducer.report)
    assert [report.step for report in reports] == [1, 2, 3]
    for report in reports:
        assert report.seconds == pytest.approx(report.compute_seconds + report.exposed_seconds)
        assert report.compute_seconds >= 0.01
        assert report.exposed_seconds > 0
        assert (
            report.sent_bytes
            == report.uncompressed_bytes
            == of_buckets(comm, reducer)
            > 2 * ring_bytes(comm, 4 * COUNT)
        )
    statistics = reducer.statistics
    for field in ("exposed_seconds", "hidden_seconds", "sent_bytes", "uncompressed_bytes"):
        total = sum(getattr(report, field) for report in reports)
        assert getattr(statistics, field) == pytest.approx(total)
    assert statistics.reductions == 3
    # All but the last bucket, whose flags are known at the end.
    assert statistics.early_launches == (3 if overlap and mode == "graph" else 0)


@pytest.mark.ranks(min=2)
def test_communication_during_computation_is_hidden(comm: Any) -> None:
    reducer = TensorReducer("hidden", groups=2, overlap=True)
    large = tf.ones(1 << 20)

    def wait(x: Any) -> Any:
        time.sleep(0.3)
        return x

    @tf.function(autograph=False)
    def step(x: Any) -> Any:
        # The last variable's gradient is ready long before the first one's.
        late = tf.reshape(tf.numpy_function(wait, [x], tf.float32, stateful=False), [1])
        return reducer([late, large], ["late", "large"])

    for _ in range(3):
        step(tf.constant([1.0]))
    assert max(comm.all_gather_object(reducer.statistics.hidden_seconds)) > 0
    assert reducer.statistics.exposed_seconds > 0


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(("compression", "fewer"), [("int8", 3.5), (hvd.Compression.fp16, 2.0)])
def test_compression_appears_in_the_report(comm: Any, compression: Any, fewer: float) -> None:
    reducer = TensorReducer(f"fewer {fewer}", compression=compression, compress_within_node=True)
    reducer([tf.ones(1 << 16)], ["one"])
    report = reducer.report
    assert report is not None
    assert report.uncompressed_bytes == pytest.approx(ring_bytes(comm, 4 << 16), rel=0.01)
    assert report.uncompressed_bytes / report.sent_bytes > 0.99 * fewer


@pytest.mark.ranks(min=2)
def test_slices_count_for_every_other_rank(comm: Any) -> None:
    reducer = TensorReducer("slices")
    rows, indices = tf.ones((5, 4)), tf.constant([0, 1, 2, 3, 4], tf.int64)
    reducer([tf.IndexedSlices(rows, indices, tf.constant([9, 4]))], ["table"])
    assert reducer.report is not None
    assert reducer.report.sent_bytes == (comm.size - 1) * (5 * 4 * 4 + 5 * 8) + of_buckets(comm, reducer)


def test_keras_and_tapes_have_reports(comm: Any) -> None:
    variable = keras.Variable(np.zeros(COUNT, np.float32))
    optimizer: Any = DistributedOptimizer(keras.optimizers.SGD(0.1), name="telling")
    optimizer.build([variable])
    assert optimizer.report is None
    optimizer.apply([tf.ones(COUNT)], [variable])
    with tf.GradientTape() as plain:
        loss = tf.reduce_sum(variable**2)
    tape = hvd.DistributedGradientTape(plain, num_groups=1)
    tape.gradient(loss, [variable])
    if comm.size == 1:
        assert optimizer.report is None
        assert tape.report is None
        return
    tellers: list[Any] = [optimizer, tape]
    for teller in tellers:
        assert teller.report.step == teller.statistics.reductions == 1
        # And a cache line for the flags.
        assert ring_bytes(comm, 4 * COUNT) < teller.report.sent_bytes <= ring_bytes(comm, 4 * COUNT + 2 * 64)
