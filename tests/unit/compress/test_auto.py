"""compression="auto": what pays is chosen, and it says why."""

from __future__ import annotations

import logging

import pytest

from commlib.compress.auto import Auto, decide, measure_cost
from commlib.compress.exchange import Exchanged
from commlib.compress.gradients import GradientCompression
from commlib.compress.quantise import Blocks
from commlib.errors import UsageError
from commlib.kernels.host.reduce import reduce_function
from tests.loopback import run

COSTS = (0.5e-9, 0.3e-9) * 2  # seconds per element to encode and to decode: bfloat16, int8


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Compile here what ranks would be given too little time for."""
    reduce_function("float64", "max")
    for codec in Auto().codecs:
        measure_cost(codec)


def chosen(pace: float, count: int = 1 << 22) -> tuple[str, str]:
    scheme, why = decide(Auto(), count, 4, [1e-3, pace, *COSTS])
    return ("none" if scheme is None else scheme.name), why


def test_a_slow_link_gets_the_smallest_payload_and_a_fast_one_none():
    name, why = chosen(8e-8)  # 100 Mbit/s
    assert name == "int8"
    assert why.startswith("int8: between 4 hosts a rank sends 12.5 MB/s, so that 4194304 float32 should take none 2014")
    assert chosen(8e-9)[0] == "int8"
    assert chosen(1e-11)[0] == "none"


def test_gains_that_are_within_the_error_of_the_prediction_are_not_taken():
    # Per element: none 4 * 1.5 * pace, int8 a quarter of that (and 1/64 for scales) and 1.225 ns of work.
    pace = 0.3e-9
    none, int8 = 6 * pace, (1 + 1 / 64) * 1.5 * pace + 1.25 * 0.5e-9 + 2 * 0.3e-9
    assert 0.9 * none < int8 < none
    assert chosen(pace)[0] == "none"
    assert chosen(1.5 * pace)[0] == "int8"


def test_it_measures_between_nodes_and_all_ranks_agree(caplog):
    caplog.set_level(logging.INFO, "commlib")

    def look(comm):
        compression = GradientCompression(comm, Auto(), count=1 << 20)
        return compression.scheme, compression.why

    results = run(3, look, nodes=[0, 0, 1])  # the second rank of the first node stands on no rail
    assert len({why for _, why in results}) == 1
    assert "between 2 hosts a rank sends" in results[0][1]
    assert f"compression {results[0][1]}" in caplog.messages
    assert all(scheme == results[0][0] for scheme, _ in results)
    if results[0][0] is not None:
        assert isinstance(results[0][0], Exchanged)


def test_on_one_node_it_does_not_even_measure():
    def look(comm):
        compression = GradientCompression(comm, Auto())
        assert compression.scheme is None
        return compression.why

    assert run(2, look) == ["none: all ranks are on one node, whose memory is faster than any codec"] * 2


def test_what_is_named_is_taken_as_asked():
    def look(comm):
        compression = GradientCompression(comm, Exchanged(Blocks(8)), within_node=True)
        return compression.scheme, compression.why

    assert run(2, look) == [(Exchanged(Blocks(8)), "int8: as asked")] * 2


def test_undecided_it_reduces_nothing():
    with pytest.raises(UsageError, match="must be decided"):
        run(1, lambda comm: Auto().reducer(comm, []))
