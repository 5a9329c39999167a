"""Actions as text, and schedules as CSV."""

from __future__ import annotations

import pytest

from commlib.errors import UsageError
from commlib.pipeline.schedule import Action, Kind, Link, make, parse, table
from commlib.pipeline.schedule.csv import read, write
from commlib.pipeline.schedule.lower import lower
from tests.bodies.pipelines import random_schedule

TEXTS = {
    "2F0": Action(2, Kind.F, 0),
    "1B3": Action(1, Kind.B, 3),
    "0I12": Action(0, Kind.I, 12),
    "11W1": Action(11, Kind.W, 1),
    "2SEND_F0": Action(2, Kind.SEND_F, 0, 3),
    "2RECV_F0": Action(2, Kind.RECV_F, 0, 1),
    "2SEND_B0": Action(2, Kind.SEND_B, 0, 1),
    "2RECV_B0": Action(2, Kind.RECV_B, 0, 3),
    "0SEND_F4:3": Action(0, Kind.SEND_F, 4, 3),
    "1REDUCE": Action(1, Kind.REDUCE),
    "0STEP": Action(0, Kind.STEP),
}


@pytest.mark.parametrize("text", TEXTS)
def test_actions_survive_their_text(text: str) -> None:
    assert parse(text) == parse(f" {text} ") == TEXTS[text]
    assert str(TEXTS[text]) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("F0", "is not an action; expected one such as 2F0"),
        ("2X0", "is not an action; expected one such as 2F0"),
        ("2F", "needs the number of a microbatch"),
        ("2REDUCE1", "takes no microbatch"),
        ("2F0:1", "only messages name another stage"),
        ("0RECV_F0", "stage -1 cannot be at the other end"),
        ("2SEND_F0:2", "stage 2 cannot be at the other end"),
    ],
)
def test_other_texts_are_refused(text: str, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        parse(text)


def test_a_message_has_two_ends() -> None:
    for text, other, link in [("2SEND_F0", "3RECV_F0", Link(2, 3)), ("2SEND_B0", "1RECV_B0", Link(1, 2))]:
        assert str(parse(text).other_end) == other
        assert parse(text).other_end.other_end == parse(text)
        assert parse(text).link == parse(other).link == link


@pytest.mark.parametrize("name", [name for name, plan in table.items() if not plan.updates])
def test_schedules_survive_csv(name: str) -> None:
    schedule = make(name, 3, 7)
    assert read(write(schedule), name) == schedule


def test_random_schedules_survive_csv() -> None:
    for seed in range(100):
        schedule, links = random_schedule(seed)
        assert read(write(schedule), schedule.name) == schedule
        assert read(write(lower(schedule, links).schedule), schedule.name) == schedule, "messages are left out"


def test_empty_cells_are_idle_times() -> None:
    assert read("0F0,,,0B0\n,1F0,1B0,\n\n") == read("0F0,0B0\n1F0,1B0")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0F0,zero\n1F0", "row 1, column 2: 'zero' is not an action"),
        ("0F0,0B0\n0F1", "row 2, column 1: 0F1: stage 0 is already on rank 0"),
        ("0F0\n2F0", "stage 1 has no action"),
        ("", "stage 0 has no action"),
    ],
)
def test_invalid_csv_is_refused(text: str, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        read(text)
