"""Every schedule of the table, for many sizes: legal, with the idle times and sizes in its docstring."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from commlib.errors import UsageError
from commlib.pipeline.schedule import Costs, Kind, Weights, find, make, render, simulate, table, verify
from commlib.pipeline.schedule.versions import count_versions, versions

GOLDEN = Path(__file__).parents[3] / "golden" / "pipeline"
SIZES = [(ranks, microbatches) for ranks in (1, 2, 3, 4, 5, 8) for microbatches in (1, 2, 3, 5, 8, 16, 17)]
SOME = [*(sizes for sizes in SIZES if sizes[0] in (1, 2, 3, 5) and sizes[1] <= 8), (4, 8), (4, 16), (8, 17)]
each_size = pytest.mark.parametrize("sizes", [pytest.param(SOME, id="some"), pytest.param(SIZES, id="all")])
# As drawn in their papers: name, ranks, microbatches, and the times of F, I and W there.
PICTURES = [
    ("gpipe", 4, 4, (1, 1, 0)),  # GPipe, figure 2c
    ("1f1b", 4, 8, (1, 1, 1)),  # PTD-P, figure 3
    ("interleaved", 4, 8, (1, 1, 1)),  # PTD-P, figure 4
    ("breadth_first", 4, 8, (1, 1, 1)),
    ("pipedream", 4, 8, (1, 1, 1)),  # PipeDream, figure 4
    ("pipedream_2bw", 4, 8, (1, 1, 1)),
    ("zb_h1", 4, 8, (1, 1, 1)),  # Zero Bubble, figure 3
    ("zb_v", 4, 8, (1, 1, 1)),
    ("dualpipev", 4, 10, (1, 1, 1)),
]


@each_size
@pytest.mark.parametrize("name", table)
def test_all_sizes_are_legal(name: str, sizes: list[tuple[int, int]]) -> None:
    for ranks, microbatches in sizes:
        schedule = make(name, ranks, microbatches)
        for reduce in (False, True):
            lowered = verify(schedule, reduce=reduce)
        simulate(lowered)
        reductions = [a for program in lowered.schedule.programs for a in program if a.kind is Kind.REDUCE]
        assert len({a.stage for a in reductions}) == schedule.stages


@each_size
@pytest.mark.parametrize("chunks", [1, 3, 4])
@pytest.mark.parametrize("name", ["interleaved", "breadth_first"])
def test_a_rank_can_have_more_stages(name: str, chunks: int, sizes: list[tuple[int, int]]) -> None:
    for ranks, microbatches in sizes:
        schedule = make(name, ranks, microbatches, stages=ranks * chunks)
        verify(schedule)
        assert schedule.placement == tuple(range(ranks)) * chunks


@pytest.mark.parametrize("picture", PICTURES, ids=[picture[0] for picture in PICTURES])
def test_pictures_match_the_golden_files(picture: tuple[str, int, int, tuple[int, int, int]]) -> None:
    """To accept new pictures: COMMLIB_GOLDEN=write python -m pytest this file, then read the diff."""
    name, ranks, microbatches, (forward, inputs, weights) = picture
    schedule = make(name, ranks, microbatches)
    got = render(schedule, Costs.even(schedule.stages, forward, inputs, weights))
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("COMMLIB_GOLDEN") == "write":
        file.write_text(got, encoding="utf-8")
    assert got == file.read_text(encoding="utf-8")


def test_every_schedule_has_a_golden_picture() -> None:
    assert {file.stem for file in GOLDEN.glob("*.txt")} == {picture[0] for picture in PICTURES} == set(table)


def test_gpipe_is_figure_2_of_its_paper() -> None:
    rows = render(make("gpipe", 4, 4), Costs.even(4, 1, 1, 0)).splitlines()[1:]
    assert rows[0] == "rank 0 │ F0 F1 F2 F3 ·  ·  ·  ·  ·  ·  B3 B2 B1 B0"
    assert rows[3] == "rank 3 │ ·  ·  ·  F0 F1 F2 F3 B3 B2 B1 B0 ·  ·  ·"


def test_pipedream_is_figure_4_of_its_paper() -> None:
    rows = render(make("pipedream", 4, 8)).splitlines()[1:]
    assert rows[0].startswith("rank 0 │ F0 F1 F2 F3 ·  ·  ·  ·  ·  ·  B0 ── F4 B1 ── F5 B2 ── F6")
    assert rows[3].startswith("rank 3 │ ·  ·  ·  F0 B0 ── F1 B1 ── F2 B2 ── F3 B3 ── F4")


def test_zb_h1_is_figure_3_of_its_paper() -> None:
    rows = render(make("zb_h1", 4, 8)).splitlines()[1:]
    assert rows[0] == "rank 0 │ F0 F1 F2 F3 ·  ·  ·  I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7"
    assert rows[3] == "rank 3 │ ·  ·  ·  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7"


def test_interleaved_warms_up_as_in_figure_4_of_its_paper() -> None:
    """Eight microbatches, four devices, two stages each: 1-4 of the first stage, 1-4 of the second, then 5-8."""
    first, *_, last = make("interleaved", 4, 8).programs
    assert " ".join(map(str, first[:12])) == "0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 0F4 0F5 0F6 4B0"
    assert " ".join(map(str, last[:9])) == "3F0 3F1 3F2 3F3 7F0 7B0 7F1 7B1 7F2"


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("forward", [1, 2])
def test_idle_times_match_the_docstrings(ranks: int, forward: int) -> None:
    """F, and I = W = 1: B = 2. Idle of one rank; the same for all."""
    microbatches = 4 * ranks

    def idle(name: str, stages: int, weight: float = 1) -> float:
        schedule = make(name, ranks, microbatches, stages=stages)
        costs = Costs.even(stages, forward, 1, weight)
        timing = simulate(schedule, costs)
        return timing.seconds - microbatches * (stages // ranks) * (forward + 1 + weight)

    for name in ("gpipe", "1f1b", "pipedream", "pipedream_2bw"):
        assert idle(name, ranks) == (ranks - 1) * (forward + 2)
    for chunks in (2, 4):
        for name in ("interleaved", "breadth_first"):
            assert idle(name, chunks * ranks) == (ranks - 1) * (forward + 2), "of stages that are 1/v as long"
    assert idle("zb_h1", ranks) == (ranks - 1) * (forward + 1 - 1)
    assert idle("zb_v", 2 * ranks) <= (ranks - 1) * max(forward, 1) * 2


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_activations_match_the_docstrings(ranks: int) -> None:
    microbatches = 4 * ranks
    peak = {name: simulate(make(name, ranks, microbatches)).peak for name in table}
    assert peak["gpipe"] == (microbatches,) * ranks
    assert peak["breadth_first"] == (2 * microbatches,) * ranks
    for name in ("1f1b", "pipedream", "pipedream_2bw"):
        assert peak[name] == tuple(ranks - rank for rank in range(ranks))
    assert peak["interleaved"] == tuple(2 * (ranks - rank - 1) + ranks + 1 for rank in range(ranks))
    assert max(peak["zb_h1"]) == ranks
    assert peak["zb_v"] == (2 * ranks,) * ranks
    assert max(peak["dualpipev"]) <= 2 * ranks + 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_pipedream_keeps_as_many_weights_as_are_in_flight(ranks: int) -> None:
    assert count_versions(make("pipedream", ranks, 4 * ranks)) == tuple(ranks - rank for rank in range(ranks))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_pipedream_2bw_keeps_two_versions_and_uses_the_same_on_all_stages(ranks: int) -> None:
    schedule = make("pipedream_2bw", ranks, 6 * ranks, every=2 * ranks)
    assert count_versions(schedule) == (2,) * ranks
    versions_ = versions(schedule)
    for microbatch in range(6 * ranks):
        assert {versions_[stage, microbatch][0] for stage in range(ranks)} == {max(0, microbatch // (2 * ranks) - 1)}
    assert schedule.weights is Weights.PREVIOUS


def test_schedules_have_names() -> None:
    assert find("ZB-H1") is find("zb_h1")
    with pytest.raises(UsageError, match=r"unknown schedule 'gpip'; expected one of .*1f1b"):
        find("gpip")


@pytest.mark.parametrize(
    ("name", "sizes", "options", "expected"),
    [
        ("1f1b", (2, 4), {"stages": 4}, r"4 stages on 2 ranks; expected 2: 1 on each"),
        ("zb_v", (2, 4), {"stages": 2}, r"2 stages on 2 ranks; expected 4: 2 on each"),
        ("interleaved", (2, 4), {"stages": 3}, r"3 stages on 2 ranks; expected a multiple of that"),
        ("1f1b", (0, 4), {}, r"0 ranks and 4 microbatches"),
        ("1f1b", (2, 0), {}, r"2 ranks and 0 microbatches"),
        ("1f1b", (2, 4), {"every": 1}, r"leaves updates to the optimizer"),
        ("pipedream_2bw", (4, 8), {"every": 3}, r"every is 3, expected at least 4: fewer than the 4 ranks"),
    ],
)
def test_senseless_options_are_refused(
    name: str, sizes: tuple[int, int], options: dict[str, int], expected: str
) -> None:
    with pytest.raises(UsageError, match=expected):
        make(name, *sizes, **options)


@pytest.mark.parametrize("microbatches", [1024, pytest.param(4096, marks=pytest.mark.long)])
def test_thousands_of_microbatches_are_planned(microbatches: int) -> None:
    schedule = make("1f1b", 4, microbatches)
    assert simulate(verify(schedule)).seconds == 3 * microbatches + 3 * 3
