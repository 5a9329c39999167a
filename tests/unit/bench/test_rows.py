"""The figures that follow from times, by the definitions of nccl-tests."""

from __future__ import annotations

import pytest

from commlib.bench.rows import mistakes
from commlib.bench.verbs import VERBS
from tests.unit.bench.figures import row


@pytest.mark.parametrize(
    "verb, factor",
    [
        ("all_reduce", 1.5),
        ("reduce_scatter", 0.75),
        ("all_gather", 0.75),
        ("all_to_all", 0.75),
        ("gather", 0.75),
        ("scatter", 0.75),
        ("broadcast", 1),
        ("reduce", 1),
        ("send_recv", 1),
    ],
)
def test_bandwidths_are_computed(verb, factor):
    one = row(verb)
    assert one.time() == 100e-6 and one.time("mpi") == 250e-6
    assert one.ratio("mpi") == pytest.approx(2.5)
    assert one.algbw() == pytest.approx((1 << 20) / 100e-6 / 1e9)
    assert one.busbw() == pytest.approx(one.algbw() * factor)
    assert one.busbw("mpi") == pytest.approx(one.busbw() / 2.5)


def test_one_rank_has_no_bus():
    assert row(ranks=1).busbw() == 0


# verb, in place: what all ranks together give, what they get and had not yet, as multiples of n
TOTALS = {
    ("all_reduce", True): lambda p: (p, p),
    ("all_reduce", False): lambda p: (p, p),
    ("reduce_scatter", False): lambda p: (p, 1),
    ("all_gather", False): lambda p: (1, p),
    ("all_gather", True): lambda p: (1, p - 1),
    ("broadcast", True): lambda p: (1, p - 1),
    ("reduce", False): lambda p: (p, 1),
    ("all_to_all", False): lambda p: (p, p),
    ("all_to_all", True): lambda p: (p - 1, p - 1),
    ("gather", False): lambda p: (1, 1),
    ("scatter", False): lambda p: (1, 1),
    ("send_recv", False): lambda p: (p, p),
}


@pytest.mark.parametrize("verb, in_place", TOTALS)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_bound_is_every_byte_read_once_and_written_once(verb, in_place, ranks):
    nbytes = 840 << 10
    given, got = TOTALS[verb, in_place](ranks)
    read, written, replaces = VERBS[verb].bound(nbytes, ranks, in_place=in_place)
    assert (read, written) == (nbytes * given // ranks, nbytes * got // ranks)
    assert replaces == ((verb, in_place) in (("all_reduce", True), ("all_to_all", True)))


def test_the_share_of_the_bound_is_computed():
    assert row().of_bound() == pytest.approx(0.8)  # the best pass / the median time
    assert row(bound_seconds=[]).of_bound() is None
    assert row(size=32 << 10).of_bound() is None


def test_bad_rows_are_refused():
    assert mistakes([row(), row(wrong=None)]) == 0
    assert mistakes([row(wrong={"commlib": 2, "mpi": 9}), row(wrong={"commlib": 1})]) == 3
