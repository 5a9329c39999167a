"""Buckets and codecs of a late device over MPI: through host memory, and directly."""

from __future__ import annotations

import numpy as np
import pytest

from commlib.compress import Auto
from commlib.compress.codecs.quantise import Blocks
from commlib.compress.codecs.sign import Sign
from commlib.compress.codecs.sparse import TopK
from commlib.compress.gradients import GradientCompression
from commlib.data_parallel.bucket_reducer import BucketReducer
from commlib.data_parallel.buckets import Parameter, make_buckets
from commlib.devices.arrays import as_contiguous
from tests.bodies import compression
from tests.late import LATE

pytestmark = [pytest.mark.any_ranks, pytest.mark.any_mpi]

SPECS = [Parameter(name, count, "float32", 4, device="late") for name, count in [("a", 5), ("b", 3000), ("c", 70_000)]]


@pytest.fixture(scope="module")
def comm(both_ways):
    return both_ways


def values(array):
    return LATE.at(array.address, array.shape, array.dtype, array.owner).numpy()


@pytest.mark.parametrize("early", [0, 2, 3])
def test_mean_of_slots(comm, early):
    races = LATE.races
    engine = BucketReducer(comm, make_buckets(SPECS, first_bucket_mib=0.001, bucket_cap_mib=0.01))
    for step in range(3):
        for parameter, spec in enumerate(SPECS):
            gradient = LATE.put(np.full(spec.count, 2.0 * comm.rank + step, np.float32))
            engine.write(parameter, gradient.address)
            LATE.synchronise()  # the gradient is dropped
        for bucket in range(early):
            engine.launch(bucket)
        engine.finish(range(early, len(engine.buckets)), unused=() if comm.rank or early else (1,))
        for parameter, spec in enumerate(SPECS):
            mean = comm.size - 1 + step - (step / comm.size if parameter == 1 and not early else 0)
            np.testing.assert_allclose(values(engine.slot(parameter)), np.full(spec.count, mean), rtol=1e-6)
            assert engine.used(parameter) == (parameter != 1 or early > 0 or comm.size > 1)
    assert LATE.races == races


@pytest.mark.parametrize("codec", [Blocks(), Sign(), TopK(0.01)], ids=lambda codec: codec.name)
def test_a_devices_payloads_are_exchanged(comm, codec):
    """Each rank encodes on its device; all decode there what every rank has sent, as the host does."""
    xs = [np.random.default_rng(rank).standard_normal(5000).astype(np.float32) for rank in range(comm.size)]
    x = as_contiguous(LATE.put(xs[comm.rank]), "test")
    payload = x.empty((codec.payload_bytes(5000),), np.uint8)
    LATE.kernels.fill(payload, 0)
    codec.encode(x, payload)
    gathered = as_contiguous(comm.all_gather(payload), "test")
    total, length = x.empty((5000,), np.float32), len(payload)
    for rank in range(comm.size):
        codec.decode(gathered[rank * length : (rank + 1) * length], total, add=rank > 0)
    expected, decoded = np.zeros(5000, np.float32), np.zeros(5000, np.float32)
    for rank, other in enumerate(xs):
        host = np.zeros(length, np.uint8)
        codec.encode(other, host)
        codec.decode(host, decoded if rank else expected)
        if rank:
            expected += decoded
    np.testing.assert_array_equal(values(total), expected)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("name", ["int8", "sign", "topk", "randomk", "powersgd", "dgc"])
def test_compressed_buckets_match_the_hosts_bits(comm, name):
    races = LATE.races
    compression.check(comm, name)
    assert LATE.races == races


@pytest.mark.ranks(min=2)
def test_auto_measures_on_the_device(comm):
    races, queued = LATE.races, LATE.queued
    compression = GradientCompression(comm, Auto(), within_node=True, count=1 << 20, device=LATE)
    assert LATE.queued > queued and LATE.races == races
    assert compression.why.endswith(", on late")
    assert len(set(comm.all_gather_object(compression.why))) == 1
