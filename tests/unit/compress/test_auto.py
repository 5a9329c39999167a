"""compression="auto": chooses compression that pays, and gives the reason."""

from __future__ import annotations

import logging

import pytest

from commlib.compress import scheme_of
from commlib.compress.auto import Auto, decide, measure_cost, measure_link
from commlib.compress.codecs.quantise import Blocks
from commlib.compress.gradients import GradientCompression
from commlib.compress.memory import Memory
from commlib.compress.schemes.all_to_all import AllToAll
from commlib.devices.host import HOST
from commlib.errors import UsageError
from commlib.kernels.reductions import reduction
from tests.bodies.loopback import run
from tests.late import LATE


def unwatched(text):
    return lambda: None


COSTS = (0.5e-9, 0.3e-9) * 2  # seconds per element to encode and to decode: bfloat16, int8


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Compile kernels here: ranks would have too little time."""
    reduction("float64", "max")
    for codec in Auto().codecs:
        measure_cost(codec, Memory(HOST, unwatched))


def chosen(pace: float, count: int = 1 << 22) -> tuple[str, str]:
    scheme, why = decide(Auto(), count, 4, [1e-3, pace, *COSTS])
    return ("none" if scheme is None else scheme.name), why


def test_a_slow_link_gets_the_smallest_payload_and_a_fast_link_no_codec():
    name, why = chosen(8e-8)  # 100 Mbit/s
    assert name == "int8"
    assert why.startswith(
        "int8: between 4 hosts a rank sends 12.5 MB/s; predicted times for 4194304 float32: none 2014"
    )
    assert chosen(8e-9)[0] == "int8"
    assert chosen(1e-11)[0] == "none"


def test_gains_within_the_prediction_error_are_ignored():
    # Per element: none 4 * 1.5 * pace, int8 a quarter of that (and 1/64 for scales) and 1.225 ns of work.
    pace = 0.3e-9
    none, int8 = 6 * pace, (1 + 1 / 64) * 1.5 * pace + 1.25 * 0.5e-9 + 2 * 0.3e-9
    assert 0.9 * none < int8 < none
    assert chosen(pace)[0] == "none"
    assert chosen(1.5 * pace)[0] == "int8"


def test_auto_measures_between_nodes_and_all_ranks_agree(caplog):
    caplog.set_level(logging.INFO, "commlib")

    def look(comm):
        compression = GradientCompression(comm, Auto(), count=1 << 20)
        return compression.scheme, compression.why

    results = run(3, look, nodes=[0, 0, 1])  # the second rank of the first node is on no rail
    assert len({why for _, why in results}) == 1
    assert "between 2 hosts a rank sends" in results[0][1]
    assert f"compression {results[0][1]}" in caplog.messages
    assert all(scheme == results[0][0] for scheme, _ in results)
    if results[0][0] is not None:
        assert isinstance(results[0][0], AllToAll)


@pytest.mark.parametrize("devices", [(), ("late",)], ids=["staged", "direct"])
def test_codecs_are_measured_on_the_device_of_the_gradients(monkeypatch, devices):
    """Slow device kernels make codecs expensive that are cheap on the host; the link is the same."""
    monkeypatch.setattr("commlib.compress.auto.SAMPLE_ON_DEVICE", 1 << 16)
    monkeypatch.setattr("commlib.compress.gradients.measure_link", lambda comm, memory: (1e-3, 1e-8))
    monkeypatch.setattr(LATE, "delay", 0.01)  # 150 ns for an element, that takes 40 ns to be sent

    def look(comm):
        compressions = [GradientCompression(comm, Auto(), count=1 << 20, device=device) for device in (HOST, LATE)]
        return [(compression.scheme and compression.scheme.name, compression.why) for compression in compressions]

    queued, races = LATE.queued, LATE.races
    results = run(2, look, nodes=[0, 1], devices=devices)
    assert LATE.queued > queued and LATE.races == races
    for (host, _), (late, why) in results:
        assert host in ("bfloat16", "int8")
        assert late is None and why.startswith("none: between 2 hosts") and why.endswith(", on late")


def test_a_link_is_measured_until_the_sum_arrives(monkeypatch):
    """A call may return while the copy back to the device is still under way."""
    monkeypatch.setattr(LATE, "delay", 0.03)

    def look(comm):
        return measure_link(comm, Memory(LATE, comm.watch))[0]

    # Out and back, in one piece: 2 copies, for the least of reductions.
    assert all(latency > 1.8 * LATE.delay for latency in run(2, look, nodes=[0, 1]))


def test_a_codec_is_measured_until_it_is_done(monkeypatch):
    monkeypatch.setattr("commlib.compress.auto.SAMPLE_ON_DEVICE", 1 << 10)
    monkeypatch.setattr(LATE, "delay", 0.02)
    for codec in Auto().codecs:
        encode, decode = measure_cost(codec, Memory(LATE, unwatched))
        assert encode * (1 << 10) >= LATE.delay and decode * (1 << 10) >= LATE.delay


def test_auto_measures_nothing_on_one_node():
    def look(comm):
        compression = GradientCompression(comm, Auto())
        assert compression.scheme is None
        return compression.why

    assert run(2, look) == ["none: all ranks are on one node, whose memory is faster than any codec"] * 2


def test_a_named_codec_is_used_unchanged():
    def look(comm):
        compression = GradientCompression(comm, AllToAll(Blocks(8)), within_node=True)
        return compression.scheme, compression.why

    assert run(2, look) == [(AllToAll(Blocks(8)), "int8: as requested")] * 2


def test_an_undecided_auto_reduces_nothing():
    with pytest.raises(UsageError, match="must be decided"):
        run(1, lambda comm: Auto().reducer(comm, []))


@pytest.mark.parametrize("auto", [Auto(), Auto((Blocks(4, block=64),))])
def test_a_name_gives_an_equal_auto(auto):
    """TensorFlow's ranks reduce by name: they could not construct it from its name, and refused "auto"."""
    assert scheme_of(auto.name) == auto
