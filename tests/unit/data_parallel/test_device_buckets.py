"""The engine on buckets of a late device, over ranks that are threads."""

from __future__ import annotations

import numpy as np
import pytest

from commlib.compress.codecs.quantise import Blocks
from commlib.compress.codecs.sparse import TopK
from commlib.compress.gradients import GradientCompression
from commlib.compress.schemes.all_gather import AllGather
from commlib.compress.schemes.all_to_all import AllToAll
from commlib.compress.schemes.power_sgd import PowerSGD
from commlib.config.settings import Config
from commlib.data_parallel.bucket_reducer import BucketReducer
from commlib.data_parallel.buckets import Parameter, make_buckets
from commlib.data_parallel.compressed_reduction import CompressedReduction
from commlib.data_parallel.memory import BucketMemory
from commlib.data_parallel.options import Gradient
from commlib.data_parallel.reducer_ranks import OrderedRanks
from commlib.devices.array import DeviceArray
from commlib.errors import UsageError
from tests.bodies import loopback
from tests.bodies.compression import assert_same
from tests.late import LATE

SPECS = [Parameter(name, count, "float32", 4, device="late", scale=0.5) for name, count in [("a", 5), ("b", 300)]]
MIXED = [*SPECS, Parameter("c", 9, "float64", 8)]
TINY = 64 / 2**20
CONFIG = Config(timeout=20, staging_kib=1)


def engine_of(comm, specs=SPECS):
    return BucketReducer(comm, make_buckets(specs, first_bucket_mib=TINY, bucket_cap_mib=TINY))


def put(engine, parameter, values):
    """Write a gradient as an adapter does: from an array of the device."""
    late = LATE.put(values)
    engine.write(parameter, late.address)
    return late


def value(engine, parameter):
    slot = engine.slot(parameter)
    assert isinstance(slot, DeviceArray)
    return LATE.at(slot.address, slot.shape, slot.dtype, slot.owner).numpy()


@pytest.mark.parametrize("nodes", [[0], [0, 0], [0, 0, 0], [0, 1], [0, 0, 1, 1]])
@pytest.mark.parametrize("early", [0, 1, 2])
def test_slots_hold_the_mean(nodes, early):
    def rank(comm):
        engine = engine_of(comm)
        for step in range(3):
            gradients = [np.arange(spec.count, dtype=np.float32) + 8 * comm.rank + step for spec in SPECS]
            alive = [put(engine, parameter, gradient) for parameter, gradient in enumerate(gradients)]
            for bucket in range(early):
                engine.launch(bucket)
            engine.finish(range(early, 2))
            for parameter, spec in enumerate(SPECS):
                mean = np.arange(spec.count, dtype=np.float32) + 8 * (comm.size - 1) / 2 + step
                np.testing.assert_allclose(value(engine, parameter), np.float32(0.5) * mean, rtol=1e-6)
                assert engine.used(parameter)
            del alive

    races = LATE.races
    loopback.run(len(nodes), rank, nodes=nodes, config=CONFIG)
    assert LATE.races == races


def test_unused_parameters_count_as_zeros():
    def rank(comm):
        engine = engine_of(comm)
        for step in range(2):
            used_here = comm.rank == step
            put(engine, 0, np.ones(5, np.float32))
            put(engine, 1, np.full(300, 7.0, np.float32))
            engine.finish(range(2), unused=() if used_here else (1,))
            np.testing.assert_array_equal(value(engine, 0), np.full(5, 0.5, np.float32))
            np.testing.assert_array_equal(value(engine, 1), np.full(300, 7.0 / 4, np.float32))
            assert engine.used(0) and engine.used(1)
        engine.finish(range(2), unused=(1,))
        assert engine.used(0) and not engine.used(1)

    loopback.run(2, rank, config=CONFIG)


def test_host_and_device_buckets_can_be_mixed():
    def rank(comm):
        engine = engine_of(comm, MIXED)
        put(engine, 0, np.ones(5, np.float32))
        put(engine, 1, np.ones(300, np.float32))
        engine.slot(2)[:] = comm.rank
        engine.finish(range(len(engine.buckets)))
        np.testing.assert_array_equal(engine.slot(2), np.full(9, 0.5))
        np.testing.assert_array_equal(value(engine, 1), np.full(300, 0.5, np.float32))

    loopback.run(2, rank, config=CONFIG)


def test_buckets_can_move_to_other_memory_and_back():
    def rank(comm):
        engine = engine_of(comm)
        for aside in (True, False):
            for index in range(2):
                engine.move(index, aside=aside)
                assert engine.is_private(index) == aside
            put(engine, 0, np.full(5, comm.rank, np.float32))
            put(engine, 1, np.full(300, comm.rank, np.float32))
            engine.finish(range(2))
            np.testing.assert_array_equal(value(engine, 1), np.full(300, 0.25, np.float32))

    loopback.run(2, rank, config=CONFIG)


def test_a_missing_wait_for_flags_is_detected(monkeypatch):
    """The flags of the step before, or poison, must not pass for those of this one."""

    def rank(comm):
        engine = engine_of(comm)
        put(engine, 0, np.ones(5, np.float32))
        engine.finish(range(2), unused=(1,))
        assert engine.used(0) and not engine.used(1)

    loopback.run(2, rank, config=CONFIG)
    monkeypatch.setattr("commlib.data_parallel.memory.wait_for", lambda event, watch: None)
    with pytest.raises(AssertionError):
        loopback.run(2, rank, config=CONFIG)


def test_gradients_written_by_another_stream_are_waited_for(monkeypatch):
    """Launching is ordered after the stream that wrote the slots."""
    monkeypatch.setattr(LATE, "delay", 0.05)

    def rank(comm):
        engine = engine_of(comm)
        with LATE.using(LATE.stream()):
            alive = [put(engine, i, np.full(count, comm.rank, np.float32)) for i, count in enumerate((5, 300))]
            engine.launch(0)
            engine.launch(1)
        engine.finish(())
        del alive  # copies from them are still queued before
        np.testing.assert_array_equal(value(engine, 1), np.full(300, 0.25, np.float32))

    loopback.run(2, rank, config=CONFIG)


@pytest.mark.parametrize("scheme", [AllToAll(Blocks()), PowerSGD(rank=2), AllGather(TopK(0.5), dense_below=100)])
@pytest.mark.parametrize("early", [0, 2])
def test_compressed_buckets_match_the_bits_of_the_host(scheme, early):
    def rank(comm):
        shapes = {"a": (5,), "b": (15, 20)}
        results = []
        for device in ("cpu", "late"):
            specs = [
                Parameter(name, int(np.prod(shape)), "float32", 4, device=device) for name, shape in shapes.items()
            ]
            compression = GradientCompression(comm, scheme, within_node=True)
            gradients = [Gradient(name, shape, "float32", device) for name, shape in shapes.items()]
            reduction = CompressedReduction(OrderedRanks(comm), compression, gradients)
            buckets = make_buckets(specs, first_bucket_mib=TINY, bucket_cap_mib=TINY)
            engine = BucketReducer(comm, buckets, reduction.plan)
            values = []
            for step in range(4):
                engine.move(step % 2, aside=step > 1)
                for parameter, spec in enumerate(specs):
                    gradient = np.random.default_rng(9 * comm.rank + step).standard_normal(spec.count, np.float32)
                    if device == "cpu":
                        engine.slot(parameter)[:] = gradient
                    else:
                        put(engine, parameter, gradient)
                for bucket in range(early):
                    engine.launch(bucket)
                engine.finish(range(early, 2), unused=(1,) if comm.rank == 0 and early == 0 else ())
                assert engine.used(0) and engine.used(1)
                compression.end_step()
                compression.commit()
                for parameter in range(2):
                    slot = engine.slot(parameter)
                    values.append(slot.copy() if device == "cpu" else value(engine, parameter))
            assert engine.statistics.sent_bytes > 0
            results.append((values, compression.state()))
        assert_same(results[1], results[0])

    races = LATE.races
    loopback.run(2, rank, config=CONFIG)
    assert LATE.races == races


def test_a_missing_device_is_named():
    bucket = make_buckets([Parameter("a", 5, "float32", 4, device="moon")])[0]
    with pytest.raises(UsageError, match="'moon'"):
        BucketMemory(bucket, lambda *_: np.zeros(1))
