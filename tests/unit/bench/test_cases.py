"""Cases of all ranks side by side: the check accepts a correct collective's results and no others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from commlib.bench import cases
from commlib.bench.verbs import VERBS
from commlib.dtypes import NUMPY
from tests.oracles.oracle import combined

RANKS, ROOT = 3, 1
DATA = [verb for verb in VERBS if verb != "barrier"]


def make(verb, nbytes=3000, dtype="float32", in_place=None, op="sum"):
    """Return the filled cases of all ranks."""
    place = VERBS[verb].in_place in ("usual", "only") if in_place is None else in_place
    cases_ = [
        cases.make(
            verb, rank=rank, size=RANKS, allocate=np.empty, nbytes=nbytes, dtype=dtype, op=op, root=ROOT, in_place=place
        )
        for rank in range(RANKS)
    ]
    for case in cases_:
        case.fill()
    return cases_


def collective(verb, cases_):
    """Run the collective in numpy, for all ranks at once."""
    xs: Any = [None if case.x is None else case.x.copy() for case in cases_]
    for rank, case in enumerate(cases_):
        if case.out is None:
            continue
        if verb in ("all_reduce", "reduce"):
            result = combined(xs, case.op)
        elif verb == "reduce_scatter":
            result = np.split(combined(xs, case.op), RANKS)[rank]
        elif verb == "reduce_scatter_v":
            result = np.split(combined(xs, case.op), np.cumsum(case.parts)[:-1])[rank]
        elif verb == "scan":
            result = combined(xs[: rank + 1], case.op)
        elif verb == "exscan":
            result = combined(xs[: max(1, rank)], case.op)  # undefined on rank 0
        elif verb in ("all_gather", "all_gather_v", "gather"):
            result = np.concatenate(xs)
        elif verb == "broadcast":
            result = xs[ROOT]
        elif verb == "scatter":
            result = np.split(xs[ROOT], RANKS)[rank]
        elif verb == "all_to_all_v":
            parts = [np.split(x, np.cumsum(cases_[source].splits)[:-1]) for source, x in enumerate(xs)]
            result = np.concatenate([parts[source][rank] for source in range(RANKS)])
        elif verb == "all_to_all":
            result = np.concatenate([np.split(x, RANKS)[rank] for x in xs])
        else:
            result = xs[(rank - 1) % RANKS]
        case.out[...] = result


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "complex128"])
@pytest.mark.parametrize("verb", DATA)
@pytest.mark.parametrize("nbytes", [1, 3000, 70_000])
def test_a_correct_collective_has_no_errors(verb, dtype, nbytes):
    cases_ = make(verb, nbytes, dtype)
    collective(verb, cases_)
    assert [case.wrong() for case in cases_] == [0] * RANKS


@pytest.mark.parametrize("verb", [name for name in DATA if VERBS[name].in_place == "able"])
def test_in_place_cases_are_checked(verb):
    cases_ = make(verb, in_place=True)
    for case in cases_:
        assert case.out is None or np.shares_memory(case.x, case.out)
    collective(verb, cases_)
    assert [case.wrong() for case in cases_] == [0] * RANKS


@pytest.mark.parametrize("verb", DATA)
def test_a_collective_that_does_nothing_is_wrong_everywhere(verb):
    """Data that an earlier contender left in the result must not pass as a result."""
    cases_ = make(verb)
    collective(verb, cases_)
    for case in cases_:
        case.fill()
    if VERBS[verb].in_place == "usual":
        assert all(case.wrong() > len(case.out) // 2 for case in cases_)
        return
    for case in cases_:
        if case.wanted is None or (verb == "broadcast" and case.rank == ROOT):
            assert case.wrong() == 0
        else:
            assert case.wrong() == len(case.out)


@pytest.mark.parametrize("verb", DATA)
def test_single_wrong_elements_are_counted(verb):
    cases_ = make(verb)
    collective(verb, cases_)
    for case in cases_:
        if case.out is not None:
            case.out[0] += 1
            case.out[-1] = np.nan
            assert case.wrong() == (0 if case.wanted is None else 2)


def test_a_shifted_or_swapped_block_is_wrong():
    cases_ = make("all_to_all")
    collective("all_to_all", cases_)
    for case in cases_:
        shifted = np.roll(case.out, 64)
        case.out[...] = shifted
        assert case.wrong() > len(shifted) // 2
    cases_ = make("all_gather")
    collective("all_gather", cases_)
    for case in cases_:
        blocks = np.split(case.out.copy(), RANKS)
        case.out[...] = np.concatenate([blocks[1], blocks[0], blocks[2]])
        assert case.wrong() > len(case.out) // 2


def test_sizes_and_counts_match_nccl_tests():
    for verb in ("all_reduce", "broadcast", "reduce", "send_recv"):
        case = make(verb, 1000)[0]
        assert (case.count, case.nbytes) == (250, 1000)
    for verb in ("reduce_scatter", "all_gather", "all_to_all", "gather", "scatter"):
        case = make(verb, 1000)[0]
        assert (case.count, case.nbytes) == (83, 83 * RANKS * 4)  # the count of one part
    assert make("all_gather", 1)[0].nbytes == RANKS * 4  # never nothing
    lengths = {"gather": (83, 249), "scatter": (249, 83), "reduce_scatter": (249, 83), "all_to_all": (249, 249)}
    for verb, (given, got) in lengths.items():
        at_root = make(verb, 1000)[ROOT]
        assert (len(at_root.x), len(at_root.out)) == (given, got)


def test_an_uneven_exchange_has_uneven_parts():
    cases_ = make("all_to_all_v", 1000)
    assert [case.splits for case in cases_] == [[41, 82, 123], [82, 123, 41], [123, 41, 82]]
    assert [case.takes for case in cases_] == [
        list(column) for column in zip(*(case.splits for case in cases_), strict=True)
    ]
    assert all((case.count, case.nbytes) == (41, 41 * 6 * 4) for case in cases_)  # the count of the smallest part


def test_uneven_parts_grow_with_the_rank():
    for verb in ("all_gather_v", "reduce_scatter_v"):
        cases_ = make(verb, 1000)
        assert all((case.parts, case.nbytes) == ([41, 82, 123], 41 * 6 * 4) for case in cases_)
        lengths = [len(case.x if verb == "all_gather_v" else case.out) for case in cases_]
        assert lengths == [41, 82, 123]


def test_what_a_verb_without_out_returns_is_checked():
    cases_ = make("all_gather_v", 1000)
    result = np.concatenate([case.x for case in cases_])
    assert [case.wrong(result) for case in cases_] == [0] * RANKS
    assert cases_[0].wrong(result[1:]) == len(result)
    assert cases_[0].wrong(np.roll(result, 1)) > len(result) // 2
    assert cases_[0].wrong() == len(result)  # out was not written


def test_only_the_root_has_root_data():
    assert [case.out is None for case in make("gather")] == [True, False, True]
    assert [case.out is None for case in make("reduce")] == [True, False, True]
    assert [case.x is None for case in make("scatter")] == [True, False, True]
    assert [case.given is None for case in make("broadcast")] == [True, False, True]


def test_cases_can_be_cleared_and_rewritten():
    case = make("all_gather", dtype="bfloat16")[0]
    case.clear()
    assert not case.x.any() and not case.out.any()
    assert case.x.dtype == NUMPY["bfloat16"]
    case.x[...] = case.out[...] = 1
    case.rewrite()
    assert not case.x.any() and case.out.all()
    other = make("broadcast")[0]
    other.x[...] = 1
    other.rewrite()
    assert other.x.all()  # it is the root's data that is new


def test_a_barrier_has_no_data():
    case = cases.make("barrier", rank=0, size=2, allocate=lambda count, dtype: pytest.fail("no arrays"))
    case.fill()
    case.clear()
    assert (case.wrong(), case.nbytes, case.count) == (0, 0, 0)
