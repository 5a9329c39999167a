"""A broken rule is refused with its place; a schedule is accepted exactly if it terminates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commlib.pipeline.schedule import (
    Action,
    Kind,
    Link,
    LoweredSchedule,
    PipelineScheduleError,
    chain,
    lower,
    make,
    verify,
)
from commlib.pipeline.schedule.csv import read
from commlib.pipeline.schedule.replay import Replay
from commlib.pipeline.schedule.verify import check_messages
from tests.bodies.pipelines import disturbed, ends, random_schedule

RULES = [
    ("0F0,0B0\n1F0,1B0,1B0", r"1B0, action 2 of rank 1: occurs twice"),
    ("0B0,0F0\n1F0,1B0", r"0B0, action 0 of rank 0: 0F0 must come before it"),
    ("0F0,0B0\n1F0", r"rank 1: 1B0 is missing"),
    ("0F0,0F1,0B0,0B1\n1F0,1B0", r"rank 1: 1F1 is missing"),
    ("0F0,0B0\n1F0,1I0", r"rank 1: 1W0 is missing"),
    ("0F0,0W0\n1F0,1B0", r"0W0, action 1 of rank 0: 0I0 must come before it"),
    ("0F0,0B0,0W0\n1F0,1B0", r"0W0, action 2 of rank 0: 0B0 has already done that"),
    ("0F0,0I0,0B0\n1F0,1B0", r"0B0, action 2 of rank 0: 0I0 has already done that"),
    ("0F0,1F0,0B0,1B0", r"0B0, action 2 of rank 0: 1B0 must come before it on rank 0"),
    ("1F0,0F0,1B0,0B0", r"1F0, action 0 of rank 0: 0F0 must come before it on rank 0"),
    ("0F0,0F1,0B0,0REDUCE,0B1\n1F0,1B0,1F1,1B1", r"0B1, action 4 of rank 0: comes after 0REDUCE"),
    ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0", r"deadlock\n  rank 0: 0RECV_B1 waits for 1SEND_B1 of rank 1\n"),
]


@pytest.mark.parametrize(("text", "expected"), RULES, ids=[text.replace("\n", ";") for text, _ in RULES])
def test_broken_rules_are_refused(text: str, expected: str) -> None:
    with pytest.raises(PipelineScheduleError, match=expected) as caught:
        verify(read(text))
    lines = str(caught.value).splitlines()
    assert any(line.strip() == "↑" for line in lines)


def test_the_arrow_is_below_the_fault() -> None:
    with pytest.raises(PipelineScheduleError) as caught:
        verify(read("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0"))
    *_, above, arrow = str(caught.value).splitlines()
    assert above[arrow.index("↑") :].startswith("1RECV_F1")


def test_wrong_placements_and_links_are_refused() -> None:
    schedule = make("1f1b", 2, 2)
    with pytest.raises(PipelineScheduleError, match=r"stage 0 is on rank 1"):
        verify(replace(schedule, placement=(1, 0)))
    with pytest.raises(PipelineScheduleError, match=r"placed on rank 5 of 2"):
        verify(replace(schedule, placement=(0, 5)))
    with pytest.raises(PipelineScheduleError, match=r"link 1>0: expected one from a stage to a later one of the 2"):
        verify(schedule, [Link(1, 0)])


def test_pipedream_2bw_needs_the_update_before_the_last() -> None:
    """A stage that is updated late would use weights that do not exist yet."""
    schedule = make("pipedream_2bw", 2, 6)
    late = [tuple(sorted(program, key=lambda action: action.kind is Kind.STEP)) for program in schedule.programs]
    with pytest.raises(PipelineScheduleError, match=r"F4, .*uses the weights after 1 updates, but there have been 0"):
        verify(replace(schedule, programs=tuple(late)))


def test_a_queue_that_is_too_short_is_a_deadlock() -> None:
    lowered = verify(make("gpipe", 2, 4))
    shallow = replace(lowered, depths=dict.fromkeys(lowered.depths, 2))
    with pytest.raises(PipelineScheduleError, match=r"0SEND_F2 waits until rank 1 releases the message 2 before it"):
        check_messages(shallow)


def test_queues_get_enough_slots() -> None:
    """Both ranks send many gradients before they receive any: two slots each were a deadlock."""
    lowered = verify(make("breadth_first", 2, 8))
    assert lowered.depths[Link(1, 2), Kind.B] > 2


def test_messages_of_another_stage_are_refused() -> None:
    lowered = verify(make("1f1b", 2, 2))
    first, second = lowered.schedule.programs
    without = tuple(action for action in first if action != Action(0, Kind.SEND_F, 1, 1))

    def other(*programs: tuple[Action, ...]) -> LoweredSchedule:
        return replace(lowered, schedule=replace(lowered.schedule, programs=programs))

    with pytest.raises(PipelineScheduleError, match=r"link 0>1, F: .*order \[0\], but received in the order \[0, 1\]"):
        check_messages(other(without, second))
    early = (Action(0, Kind.SEND_F, 0, 1), *(action for action in first if action != Action(0, Kind.SEND_F, 0, 1)))
    with pytest.raises(PipelineScheduleError, match=r"0SEND_F0, action 0 of rank 0: 0F0 must come before it"):
        check_messages(other(early, second))


@pytest.mark.parametrize("first", range(0, 2000, 200))
def test_random_legal_schedules_are_accepted(first: int) -> None:
    for seed in range(first, first + 200):
        schedule, links = random_schedule(seed)
        assert ends(schedule, links)
        lowered = verify(schedule, links, reduce=seed % 2 == 0)
        assert not Replay(lowered).run(lambda rank, position, action: None)


@pytest.mark.parametrize("first", range(0, 4000, 400))
def test_disturbed_schedules_are_refused_exactly_if_they_do_not_terminate(first: int) -> None:
    refused = 0
    for seed in range(first, first + 400):
        schedule, links = random_schedule(seed)
        schedule = disturbed(schedule, seed)
        try:
            verify(schedule, links)
        except PipelineScheduleError as error:
            refused += 1
            assert not ends(schedule, links), error
        else:
            assert ends(schedule, links), schedule
    assert 0.2 * 400 < refused < 0.98 * 400


def test_lowering_lowered_programs_changes_nothing() -> None:
    for seed in range(100):
        schedule, links = random_schedule(seed)
        once = lower(schedule, links, reduce=True)
        again = lower(once.schedule, links, reduce=True)
        assert once == again


def test_a_chain_is_the_default() -> None:
    schedule = make("interleaved", 2, 4)
    assert lower(schedule) == lower(schedule, chain(4))
