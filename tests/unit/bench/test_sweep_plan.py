"""The contents of a plan, and the cases that follow from it."""

from __future__ import annotations

from typing import Any

import pytest

from commlib.bench.options import BenchOptionsError
from commlib.bench.sweep.plan import SweepPlan, cases, parse_plan, read, to_table
from commlib.schedule import registry


def keys(plan, *ranks_of_nodes):
    return [case.key for case in cases(plan, ranks_of_nodes)[0]]


def test_a_plan_is_a_product_over_worlds_first():
    plan = parse_plan({"verbs": ["all_reduce"], "sizes": ["4K", "1M"], "nodes": [1, "all"], "ranks_per_node": 1})
    assert keys(plan, 2, 2) == [
        f"{nodes}x1 all_reduce float32 sum auto in-place symmetric {size}"
        for nodes in (1, 2)
        for size in (4096, 1 << 20)
    ]


def test_options_that_a_verb_ignores_add_no_cases():
    plan = parse_plan(
        {
            "verbs": ["barrier", "gather", "send_recv"],
            "ops": ["sum", "max"],
            "sizes": [1024],
            "algorithms": ["ring", "auto"],
            "peers": ["mpi", "pieces"],
            "places": ["in", "out"],
        }
    )
    assert keys(plan, 2) == [
        "1x2 barrier auto out-of-place ordinary 0 +mpi",
        "1x2 gather float32 ring out-of-place symmetric 1024 +mpi",
        "1x2 gather float32 auto out-of-place symmetric 1024 +mpi",
        "1x2 send_recv float32 auto out-of-place symmetric 1024 +mpi",
    ]


def test_a_plan_covers_both_places_and_every_algorithm():
    plan = parse_plan({"verbs": "reduce_scatter", "sizes": 4096, "places": ["in", "out"], "algorithms": "every"})
    planned, _ = cases(plan, (4,))
    assert {case.in_place for case in planned} == {True, False}
    assert [case.algorithm for case in planned if case.in_place] == ["auto", *registry.algorithms("reduce_scatter")]


def test_sizes_below_one_element_for_each_rank_are_one_case():
    plan = parse_plan({"verbs": "all_gather", "sizes": [4, 8, 16, 32]})
    assert [case.nbytes for case in cases(plan, (4,))[0]] == [4, 32]


def test_cases_too_large_for_a_job_are_reported():
    plan = parse_plan({"nodes": [1, 4], "ranks_per_node": [1, 3]})
    planned, unable = cases(plan, (3, 2))
    assert {case.world for case in planned} == {(1, 1), (1, 3)}
    assert unable == ["nodes = 4: this job has 2"]
    assert cases(plan, (2,))[1] == [
        "ranks_per_node = 3 with nodes = 1: the smallest of them has 2 here",
        "nodes = 4: this job has 1",
    ]


def test_cases_have_distinct_keys():
    plan = parse_plan(
        {"verbs": ["all_reduce", "all_gather"], "dtypes": ["float32", "int8"], "places": ["in", "out"], "nodes": [1, 2]}
    )
    planned, _ = cases(plan, (2, 2))
    assert len({case.key for case in planned}) == len({case.name for case in planned}) == len(planned) == 64


def test_a_plan_survives_json():
    plan = parse_plan({"sizes": "1M", "iters": 3, "nodes": "all", "case_seconds": 2.5, "check": False})
    assert parse_plan(to_table(plan)) == plan
    assert parse_plan(to_table(SweepPlan())) == SweepPlan()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "verb": ({"verbs": ["all_redcue"]}, "verbs has 'all_redcue'; did you mean 'all_reduce'?"),
    "key": ({"size": ["4K"]}, "'size' is not a key of a plan; did you mean 'sizes'?"),
    "far off": ({"colour": 1}, "'colour' is not a key of a plan; known are verbs, sizes"),
    "size": ({"sizes": ["4Q"]}, "size '4Q': expected"),
    "peer": ({"peers": ["ucx"]}, "peers has 'ucx'; known are mpi, pieces, gloo, nccl, ordinary"),
    "device": ({"device": "tpu"}, "device is 'tpu': expected one of host, cuda"),
    "peer of a device": ({"peers": ["nccl"]}, "peers has 'nccl', which is for device = 'cuda', not 'host'"),
    "nodes": ({"nodes": [-1]}, "nodes has -1: expected whole numbers, or 'all'"),
    "truth": ({"nodes": [True]}, "nodes has True: expected whole numbers"),
    "flag": ({"check": 1}, "check is 1: expected true or false"),
    "number": ({"rounds": "many"}, "rounds is 'many': expected a number"),
    "rounds": ({"rounds": 0}, "rounds is 0: expected at least 1"),
    "nothing": ({"verbs": []}, "verbs is empty: nothing would be measured"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_plan_is_refused(case, tmp_path):
    table, message = WRONG[case]
    with pytest.raises(BenchOptionsError) as caught:
        parse_plan(table)
    assert message in str(caught.value)


def test_errors_name_the_file(tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text('verbs = ["all_reduce"]\nsizes = ["64K"]\n')
    assert read(plan) == parse_plan({"sizes": [64 << 10]})
    for text, message in {"verbs = [": "not TOML", "verbs = 3": "verbs has 3: expected texts"}.items():
        plan.write_text(text)
        with pytest.raises(BenchOptionsError, match=message) as caught:
            read(plan)
        assert str(plan) in str(caught.value)
    with pytest.raises(BenchOptionsError, match="cannot be read: No such file"):
        read(tmp_path / "none.toml")
