"""`commlib bench --device cuda`: every contender is correct for every verb, and is timed by both clocks."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
from mpi4py import MPI

from commlib.bench import measure
from commlib.bench.cases import wrong_elements
from commlib.bench.options import BenchOptions, check
from commlib.bench.preparation import choose_memory, join_peers
from commlib.bench.rows import OURS, mistakes
from commlib.bench.session import Session
from commlib.bench.verbs import ONLY_MPI, VERBS

WORLD = MPI.COMM_WORLD
PEERS = ("gloo", "nccl", "mpi")


@pytest.fixture(autouse=True)
def short_bursts(monkeypatch):
    """No test here is about speed."""
    monkeypatch.setattr(measure, "BURST_SECONDS", 0.001)


@pytest.fixture(scope="module")
def memory(gpu, comm):
    pytest.importorskip("torch")
    if not gpu.is_real:
        from tests.cuda import bench_standin

        bench_standin.install()
    with ExitStack() as stack:
        device_memory = choose_memory(stack, "cuda", comm)
        join_peers(stack, PEERS, comm, WORLD)
        yield device_memory


def session(comm, memory, verb, **options):
    options = {"sizes": (5000,), "rounds": 1, "iters": 2, **options}
    benchmark = Session(comm, WORLD, check(BenchOptions(verb, device="cuda", **options), comm.size), memory=memory)
    benchmark.probe()
    return benchmark


def expected(gpu, *missing):
    """Return the contenders that must work: all on the stand-in; a real machine may lack NCCL or CUDA-aware MPI."""
    names = {OURS, "ordinary", *PEERS} - set(missing)
    return names if not gpu.is_real else names - {"nccl", "mpi"}


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "barrier"])
def test_every_contender_is_correct(gpu, comm, memory, verb):
    benchmark = session(comm, memory, verb, peers=(*PEERS, "ordinary"))
    [(dtype, op, nbytes)] = benchmark.plan()
    case = benchmark.case(dtype, op, nbytes)
    contenders = benchmark.contenders(case)
    missing = ["gloo"] if verb == "send_recv" and comm.size == 1 else []
    missing += ["gloo", "nccl"] if verb in ONLY_MPI else []
    assert set(contenders) >= expected(gpu, *missing), benchmark.notes
    wrong = {name: wrong_elements(WORLD, own, call, memory.timer(name)) for name, (own, call) in contenders.items()}
    assert set(wrong.values()) == {0}, wrong
    assert contenders[OURS][0] is not contenders["ordinary"][0]


def test_a_contender_that_does_nothing_is_wrong(comm, memory):
    benchmark = session(comm, memory, "all_reduce")
    benchmark.makers[OURS] = lambda case: lambda: None
    [row] = benchmark.rows()
    assert mistakes([row]) > 0


@pytest.mark.parametrize("way", ["bursts", "fresh", "percentiles", "async", "plan"])
def test_both_clocks_and_the_bound(comm, memory, way):
    options: dict[str, dict[str, Any]] = {
        "bursts": {"peers": ("gloo", "ordinary")},
        "fresh": {"fresh": True},
        "percentiles": {"percentiles": True},
        "async": {"asynchronous": True},
        "plan": {"plan": True},
    }
    [small, large] = session(comm, memory, "all_reduce", sizes=(5000, 1 << 20), rounds=2, **options[way]).rows()
    assert mistakes([small, large]) == 0
    in_bursts = way not in ("fresh", "percentiles")  # single calls are timed by the host
    for row in (small, large):
        assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in row.seconds.values())
        assert set(row.events) == (set(row.seconds) - {"gloo"} if in_bursts else set())
        assert all(len(events) == 2 and min(events) > 0 for events in row.events.values())
    assert not small.bound_seconds
    assert len(large.bound_seconds) == (2 if comm.size > 1 else 0)  # the ranks share a GPU, or go through the host
    figures = [(row.seconds, row.events, row.wrong, row.bound_seconds) for row in (small, large)]
    assert all(other == figures for other in comm.all_gather_object(figures))


def test_half_precision(gpu, comm, memory):
    benchmark = session(
        comm, memory, "all_reduce", dtypes=("bfloat16",), ops=("sum", "max"), peers=(*PEERS, "ordinary")
    )
    rows = list(benchmark.rows())
    assert len(rows) == 2
    for row in rows:
        assert set(row.seconds) >= expected(gpu, "mpi") and row.wrong is not None and set(row.wrong.values()) == {0}
    assert any(note.startswith("mpi: no bfloat16 sum here: ") for note in benchmark.notes)
