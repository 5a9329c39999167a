"""`commlib bench`: every contender is correct for every verb, and a wrong one is reported."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from commlib.bench import cases, gloo_peer, measure
from commlib.bench.cases import wrong_elements
from commlib.bench.measure import burst_of, memory_pass
from commlib.bench.options import BenchOptions, BenchOptionsError, check
from commlib.bench.rows import OURS, mistakes
from commlib.bench.session import Session
from commlib.bench.verbs import ONLY_MPI, VERBS
from commlib.buffers.views import address_of
from commlib.devices.host import HOST
from commlib.dtypes import DTYPES, OPERATIONS
from commlib.errors import UsageError
from tests.oracles.oracle import REDUCIBLE

pytestmark = [pytest.mark.any_ranks, pytest.mark.any_mpi]

WORLD = MPI.COMM_WORLD
MIXED = ("float32", "bfloat16", "int8", "bool", "complex64")


@pytest.fixture(autouse=True)
def short_bursts(monkeypatch):
    """No test here is about speed."""
    monkeypatch.setattr(measure, "BURST_SECONDS", 0.001)


@pytest.fixture(scope="module")
def gloo(comm):
    pytest.importorskip("torch")
    with gloo_peer.join_gloo(WORLD, one_node=True):
        yield


WAYS: dict[str, dict[str, Any]] = {
    "async": {"asynchronous": True},
    "plan": {"plan": True},
    "plan, async": {"plan": True, "asynchronous": True},
    "ring": {"algorithm": "ring"},
    "native": {"algorithm": "native"},
    "ordinary": {"symmetric": False},
    "fresh": {"fresh": True},
}


def session(comm, verb, **options):
    options = {"sizes": (1, 5000), "rounds": 1, **options}
    if verb == "barrier":
        options.pop("sizes")
    benchmark = Session(comm, WORLD, check(BenchOptions(verb, **options), comm.size))
    benchmark.probe()
    return benchmark


def wrong_of_all(session):
    """Return the errors of each contender, by row, without measuring anything."""
    for dtype, op, nbytes in session.plan():
        case = session.case(dtype, op, nbytes)
        for name, (own, call) in session.contenders(case).items():
            yield (name, dtype, op, case.nbytes), wrong_elements(WORLD, own, call)


def assert_right(session, *contenders):
    wrong = dict(wrong_of_all(session))
    assert {name for name, *_ in wrong} == {OURS, *contenders}, session.notes
    assert set(wrong.values()) == {0}, wrong


@pytest.mark.parametrize("dtype, op", REDUCIBLE)
def test_all_reduce(comm, dtype, op):
    assert_right(session(comm, "all_reduce", dtypes=(dtype,), ops=(op,), symmetric=False, peers=("mpi",)), "mpi")


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("verb", ["reduce_scatter", "reduce"])
def test_other_reductions(comm, verb, op):
    dtypes = tuple(dtype for dtype in MIXED if (dtype, op) in REDUCIBLE)
    assert_right(session(comm, verb, dtypes=dtypes, ops=(op,), symmetric=False, peers=("mpi",)), "mpi")


@pytest.mark.parametrize("verb", ["all_gather", "broadcast", "all_to_all", "gather", "scatter", "send_recv"])
def test_movement(comm, verb):
    assert_right(session(comm, verb, dtypes=DTYPES, symmetric=False, peers=("mpi",)), "mpi")


@pytest.mark.parametrize("verb", ONLY_MPI)
def test_uneven_parts_and_scans(comm, verb):
    dtypes = MIXED if not VERBS[verb].reduces else tuple(dtype for dtype in MIXED if (dtype, "sum") in REDUCIBLE)
    assert_right(session(comm, verb, dtypes=dtypes, symmetric=False, peers=("mpi",)), "mpi")


@pytest.mark.parametrize("way", ["plan", "async"])
@pytest.mark.parametrize("verb", [name for name, verb in VERBS.items() if verb.has_plan])
def test_every_verb_in_other_forms(comm, verb, way):
    assert_right(session(comm, verb, **WAYS[way], peers=("mpi",)), "mpi")


@pytest.mark.parametrize("verb", VERBS)
def test_symmetric_buffers(comm, verb):
    assert_right(session(comm, verb, peers=("mpi",)), "mpi")


@pytest.mark.parametrize("verb", [name for name, verb in VERBS.items() if verb.rooted])
def test_a_root_other_than_0(comm, verb):
    for symmetric in (True, False):
        assert_right(session(comm, verb, root=comm.size - 1, symmetric=symmetric, peers=("mpi",)), "mpi")


@pytest.mark.parametrize("verb", [name for name, verb in VERBS.items() if verb.in_place in ("able", "usual")])
def test_out_of_place_or_in_place(comm, verb):
    other = VERBS[verb].in_place == "able"
    benchmark = session(comm, verb, in_place=other, dtypes=MIXED, symmetric=False, peers=("mpi",))
    if verb == "reduce_scatter":
        assert_right(benchmark)
        assert all("the front of its buffer" in note for note in benchmark.notes) and len(benchmark.notes) == len(MIXED)
    else:
        assert_right(benchmark, "mpi")


def test_a_large_all_reduce_in_pieces_by_gloo_and_mpi(comm, gloo):
    peers, sizes = ("mpi", "pieces", "gloo"), (1 << 20, 3_000_000)
    benchmark = session(comm, "all_reduce", dtypes=MIXED, sizes=sizes, peers=peers)
    small, large = (set(benchmark.contenders(benchmark.case("int8", "sum", size))) for size in sizes)
    assert small == {OURS, "mpi", "gloo"} and large == {OURS, *peers}  # up to 1 MiB is one piece
    assert_right(benchmark, *peers)
    options: Any = {"dtypes": ("float16",), "ops": ("mean",), "in_place": False}
    assert_right(session(comm, "all_reduce", sizes=sizes, peers=peers, **options), *peers)


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in ("send_recv", "barrier", *ONLY_MPI)])
def test_gloo(comm, gloo, verb):
    reduces = VERBS[verb].reduces
    for ops in (("sum", "max"), ("mean", "prod")) if reduces else (None,):
        dtypes = ("float32", "bfloat16", "int8") if reduces else ("float64", "bfloat16", "bool")
        assert_right(session(comm, verb, dtypes=dtypes, ops=ops, symmetric=False, peers=("gloo",)), "gloo")


@pytest.mark.ranks(min=2)
def test_gloo_ranks_other_than_0(comm, gloo):
    assert_right(session(comm, "send_recv", peers=("gloo",)), "gloo")


def test_verbs_that_gloo_lacks_are_reported_and_skipped(comm, gloo):
    benchmark = session(comm, "all_reduce", dtypes=("int16", "float32"), peers=("gloo",))
    assert len(benchmark.notes) == 1 and benchmark.notes[0].startswith("gloo: no int16 sum here: ")
    int16, float32 = list(benchmark.rows())[:2], list(benchmark.rows())[2:]
    assert all(set(row.seconds) == {OURS} for row in int16)
    assert all(set(row.seconds) == {OURS, "gloo"} and row.wrong == {OURS: 0, "gloo": 0} for row in float32)


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_call(comm, way):
    rows = list(session(comm, "all_reduce", **WAYS[way], rounds=2).rows())
    assert [row.size for row in rows] == [4, 5000]
    assert mistakes(rows) == 0
    assert all(len(row.seconds[OURS]) == 2 and min(row.seconds[OURS]) > 0 for row in rows)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_on_the_progress_thread(comm, verb):
    rows = list(session(comm, verb, asynchronous=True, peers=("mpi",)).rows())
    assert mistakes(rows) == 0
    assert all(set(row.seconds) == {OURS, "mpi"} for row in rows)


def test_all_ranks_get_the_same_figures(comm):
    rows = list(session(comm, "all_gather", sizes=(5000, 100_000), peers=("mpi",), rounds=2).rows())
    figures = [(row.size, row.count, row.seconds, row.wrong, row.bound_seconds) for row in rows]
    assert all(other == figures for other in comm.all_gather_object(figures))
    assert [len(row.bound_seconds) for row in rows] == ([0, 2] if comm.size > 1 else [0, 0])  # 64 KiB and more


def test_sizes_below_one_element_per_rank_are_measured_once(comm):
    benchmark = session(comm, "all_gather", sizes=(1, 2, 4, 8 * comm.size), dtypes=("float64", "int8"))
    assert len([row for row in benchmark.plan() if row[0] == "float64"]) == 1
    assert benchmark.plan()[-1] == ("int8", "", 8 * comm.size)


BROKEN = {
    "does nothing": lambda comm, case: None,
    "keeps its own": lambda comm, case: np.copyto(case.out, case.x),
    "adds twice": lambda comm, case: [comm.all_reduce(case.x, out=case.out), np.add(case.out, case.x, case.out)],
    "forgets the last element": lambda comm, case: comm.all_reduce(case.x[:-1], out=case.out[:-1]),
    "is off by one place": lambda comm, case: np.copyto(case.out, np.roll(comm.all_reduce(case.x), 1)),
    "is wrong on one rank": lambda comm, case: np.copyto(case.out, comm.all_reduce(case.x) * (comm.rank != 1)),
}


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("way", BROKEN)
def test_a_broken_contender_is_reported(comm, way):
    benchmark = session(comm, "all_reduce", in_place=False, sizes=(5000,))
    benchmark.makers["broken"] = lambda case: lambda: BROKEN[way](comm, case)
    [row] = benchmark.rows()
    assert row.wrong is not None and row.wrong[OURS] == 0
    if way == "forgets the last element":
        assert row.wrong["broken"] == 2 * comm.size  # before and after
    else:
        assert row.wrong["broken"] >= 1250  # of the elements of one rank
    benchmark.makers[OURS] = benchmark.makers["broken"]
    assert mistakes(benchmark.rows()) > 0  # determines the exit code


@pytest.mark.ranks(min=2)
def test_a_result_that_goes_wrong_during_a_burst_is_detected(comm):
    """A correct first call proves little: the check is repeated afterwards."""
    benchmark = session(comm, "all_reduce", sizes=(5000,))
    calls = []

    def make(case):
        def call():
            calls.append(1)
            comm.all_reduce(case.x, out=case.x)
            if len(calls) > 3:
                case.x[7] = -1

        return call

    benchmark.makers["tiring"] = make
    [row] = benchmark.rows()
    assert row.wrong is not None and row.wrong["tiring"] == comm.size


def test_without_checks_no_result_is_called_correct(comm):
    rows = list(session(comm, "all_reduce", check=False).rows())
    assert [row.wrong for row in rows] == [None, None]


def test_unsupported_cases_are_refused_on_all_ranks(comm):
    with pytest.raises(BenchOptionsError, match="no algorithm 'rnig'; known are"):
        session(comm, "all_reduce", algorithm="rnig")
    with pytest.raises(UsageError, match="without losing digits"):
        session(comm, "all_reduce", algorithm="native", dtypes=("bfloat16",))


def test_bursts_count_passes_over_memory(comm):
    """All ranks agree on their number."""
    seconds = burst_of(WORLD, memory_pass(1000, 600, True))()
    assert comm.all_gather_object(seconds) == [seconds] * comm.size


def _place(comm, array):
    return comm.group.symmetric_on(HOST).find(address_of(array), array.nbytes)


def test_symmetric_arrays_are_symmetric(comm):
    case = session(comm, "all_gather").case("float32", "", 5000)
    assert _place(comm, case.x) is not None and _place(comm, case.out) is not None
    ordinary = session(comm, "all_gather", symmetric=False).case("float32", "", 5000)
    assert _place(comm, ordinary.x) is None
    assert isinstance(case, cases.Case)
