"""Compressed buckets over the slow link between pretended nodes."""

from __future__ import annotations

import numpy as np
import pytest

from commlib.compress.bucket import CompressedBucket, SlowLink, parts_within, split_piece
from commlib.compress.scheme import BucketPart
from commlib.compress.schemes.all_to_all import AllToAll
from tests.bodies.loopback import run
from tests.unit.compress.known_codecs import Exact, Whole

PARTS = [BucketPart("a", 0, (40, 50)), BucketPart("b", 2016, (700,)), BucketPart("c", 2720, (1,))]
FLAGS = 2736
COUNT = FLAGS + 16


def bucket(comm):
    array = comm.empty(COUNT)
    for part in PARTS:
        array[part.start : part.stop] = np.arange(part.count) % 11 + comm.rank
    array[FLAGS] = 1  # used everywhere
    array[FLAGS + 1] = comm.rank == comm.size - 1
    return array


@pytest.mark.parametrize("nodes", [[0, 1], [0, 1, 2], [0, 0, 1, 1], [0, 1, 0, 1, 0], [0, 0, 0, 1]])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_sums_over_nodes_are_exact_with_an_exact_codec(nodes, op):
    def reduce(comm):
        link = SlowLink(comm)
        assert link.compresses
        array = bucket(comm)
        plan = CompressedBucket(link, AllToAll(Exact()), array, PARTS, FLAGS, op, "bucket 0")
        plan()
        assert plan.finite
        first = array.copy()
        array[:] = bucket(comm)
        plan.start().wait()
        np.testing.assert_array_equal(array, first)
        return first

    size = len(nodes)
    for result in run(size, reduce, nodes=nodes):
        for part in PARTS:
            each = np.arange(part.count) % 11
            expected = each * size + sum(range(size))
            # With a mean, 1/size of each value is added: three roundings of at most half a unit in the last place each.
            if op == "sum":
                np.testing.assert_array_equal(result[part.start : part.stop], expected)
            else:
                np.testing.assert_allclose(result[part.start : part.stop], expected / size, rtol=4e-7)
        assert result[FLAGS] > 0
        assert result[FLAGS + 1] > 0
        assert not result[FLAGS + 2 :].any()


@pytest.mark.parametrize("nodes", [[0, 1], [0, 0, 1, 1], [0, 0, 0, 1]])
def test_another_array_is_reduced_with_the_same_residuals(nodes):
    """One rank's bucket may move to memory of its own: sums and residuals do not change."""

    def reduce(comm):
        link, ends = SlowLink(comm), []
        for moves in (False, True):
            array = bucket(comm)
            plan = CompressedBucket(link, AllToAll(Whole()), array, PARTS, FLAGS, "sum", "bucket")
            for step in range(4):
                if moves and comm.rank == step % 2:
                    array = np.zeros(COUNT, np.float32)
                    plan.use(array)
                array[:] = bucket(comm)
                array[:FLAGS] *= 0.3
                before = array.copy()
                plan()
                ends.append(array.tobytes())
                assert not np.array_equal(array, before)
        assert ends[:4] == ends[4:]

    run(len(nodes), reduce, nodes=nodes)


def test_on_one_node_only_an_explicit_codec_compresses():
    def look(comm):
        assert not SlowLink(comm).compresses
        assert SlowLink(comm, within_node=True).compresses

    run(3, look)


def test_only_data_leaving_the_node_is_counted():
    def reduce(comm):
        plan = CompressedBucket(SlowLink(comm), AllToAll(Exact()), bucket(comm), PARTS, FLAGS, "sum", "bucket")
        plan()
        return plan.sent_bytes, plan.uncompressed_bytes

    results = run(4, reduce, nodes=[0, 0, 1, 1])
    assert all(uncompressed == COUNT * 4 // 2 for _, uncompressed in results)
    for node in (results[:2], results[2:]):
        total = sum(total for total, _ in node)
        assert FLAGS * 4 <= total <= FLAGS * 4 + 2 * 2 * (64 + 4)  # two rows in each rail have flags and padding


def test_indivisible_parameters_are_not_cut():
    def look(comm):
        link = SlowLink(comm)
        assert link.rails == 2
        assert link.shares(PARTS, FLAGS, divisible=False) == [(0, 2016), (2016, FLAGS)]
        assert link.shares(PARTS, FLAGS, divisible=True) == [(0, 1536), (1536, FLAGS)]

    run(4, look, nodes=[0, 0, 1, 1])


def test_pieces_have_the_name_of_their_parameter():
    assert parts_within(PARTS, 2048, FLAGS) == [BucketPart("b[32:700]", 0, (668,)), BucketPart("c", 672, (1,))]
    assert parts_within(PARTS, 0, 2048) == [PARTS[0], BucketPart("b[0:32]", 2016, (32,))]


def test_names_of_pieces_can_be_parsed():
    for part in parts_within([BucketPart("layer[0:1].w", 0, (10,))], 3, 10):
        assert split_piece(part.name) == ("layer[0:1].w", "[3:10]")
    assert split_piece("layer[a].w") == ("layer[a].w", "")


def test_nonfinite_padding_is_cleared():
    def reduce(comm):
        array = bucket(comm)
        array[2005] = np.nan  # padding: nobody's value
        plan = CompressedBucket(SlowLink(comm), AllToAll(Exact()), array, PARTS, FLAGS, "sum", "bucket")
        plan()
        assert plan.finite
        array[5] = np.nan
        plan()
        assert not plan.finite
        array[2005], array[:FLAGS] = np.inf, bucket(comm)[:FLAGS]
        plan()
        assert plan.finite

    run(2, reduce, nodes=[0, 1])
