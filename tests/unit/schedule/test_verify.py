"""`verify` finds every kind of mistake, and names its rank and round."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from commlib.schedule import (
    EMPTY,
    Copy,
    Program,
    Recv,
    Round,
    ScheduleError,
    Send,
    Span,
    algorithms,
    find,
    program,
    verbs,
    verify,
)

A, B = Span(0, 1), Span(1, 2)


def programs(verb: str, *ranks: Sequence[Round], regions: tuple[int, ...] = (1,), root: int = 0) -> list[Program]:
    return [
        Program(verb, "handmade", rank, len(ranks), root, regions, tuple(rounds)) for rank, rounds in enumerate(ranks)
    ]


def trade(peer: int, span: Span = A, reduce: bool = True) -> Round:
    return Round((Send(peer, span),), (Recv(peer, span, reduce),))


def send(peer: int, span: Span = A) -> Round:
    return Round(sends=(Send(peer, span),))


def recv(peer: int, span: Span = A, reduce: bool = False) -> Round:
    return Round(recvs=(Recv(peer, span, reduce),))


def test_a_correct_handmade_program_passes() -> None:
    verify(programs("all_reduce", [trade(1)], [trade(0)]))


WRONG: dict[str, tuple[list[Program], str]] = {
    "counted twice": (
        programs("all_reduce", [trade(1), trade(1)], [trade(0), trade(0)]),
        r"rank [01], round 1: adds the data of rank [01] to chunk 0, which counts the input of ranks 0, 1 twice",
    ),
    "a send is missing": (
        programs("broadcast", [], [recv(0)]),
        r"deadlock\n  rank 1, round 0: waits to receive 0 from rank 0, which has finished",
    ),
    "a receive is missing": (
        programs("broadcast", [send(1), send(1)], [recv(0)]),
        r"deadlock\n  rank 0, round 1: waits to send 0 to rank 1, which has finished",
    ),
    "only buffering would hide it": (
        programs("all_gather", [send(1, A), recv(1, B)], [send(0, B), recv(0, A)], regions=(2,)),
        r"deadlock\n  rank 0, round 0: waits to send 0 to rank 1, which waits in round 0"
        r"\n  rank 1, round 0: waits to send 1 to rank 0, which waits in round 0",
    ),
    "a circle of three": (
        programs("barrier", *([send((r + 1) % 3, EMPTY), recv((r - 1) % 3, EMPTY)] for r in range(3)), regions=()),
        r"rank 0, round 0: waits to send · to rank 1, .*\n.*rank 1, round 0.*\n.*rank 2, round 0",
    ),
    "lengths differ": (
        programs("broadcast", [send(1, Span(0, 2))], [recv(0)], regions=(2,)),
        r"rank 1, round 0: receives 1 chunks \(0\) from rank 0, whose round 0 sends 2 \(0-1\)",
    ),
    "plain receive into what is sent": (
        programs("all_reduce", [trade(1, reduce=False)], [trade(0)]),
        r"rank 0, round 0: would send 0 to rank 1 and receive 0 from rank 1 at once",
    ),
    "two receives into one chunk": (
        programs("reduce", [Round(recvs=(Recv(1, A, True), Recv(2, A)))], [send(0)], [send(0)]),
        r"rank 0, round 0: would add 0 from rank 1 and receive 0 from rank 2 into the same chunks",
    ),
    "outside the region": (
        programs("broadcast", [send(1, B)], [recv(0, B)]),
        r"rank 0, round 0: the chunks 1\.\.2 are not within one region",
    ),
    "across two regions": (
        programs("all_to_all", [Round(copies=(Copy(Span(0, 2), Span(0, 2)),))], regions=(1, 1)),
        r"rank 0, round 0: the chunks 0\.\.2 are not within one region",
    ),
    "backwards": (
        programs("broadcast", [send(1, Span(1, 0))], [recv(0, A)]),
        r"rank 0, round 0: the chunks 1\.\.0 are not within one region",
    ),
    "copies of different lengths": (
        programs("all_to_all", [Round(copies=(Copy(Span(0, 2), Span(2, 3)),))], [], regions=(2, 2)),
        r"rank 0, round 0: copies 2 chunks over 1",
    ),
    "copies over itself": (
        programs("all_to_all", [Round(copies=(Copy(Span(0, 2), Span(1, 3)),))], [], regions=(3, 3)),
        r"rank 0, round 0: copies the chunks 0-1 over themselves, 1-2",
    ),
    "to itself": (programs("broadcast", [send(0)], [recv(0)]), r"rank 0, round 0: cannot send 0 to rank 0"),
    "to nobody": (programs("broadcast", [send(2)], [recv(0)]), r"rank 0, round 0: cannot send 0 to rank 2"),
    "sends what it does not have": (
        programs("broadcast", [recv(1)], [send(0)]),
        r"rank 1, round 0: sends chunk 0, which has no data yet",
    ),
    "adds to what it does not have": (
        programs("broadcast", [send(1)], [recv(0, reduce=True)]),
        r"rank 1, round 0: adds the data of rank 0 to chunk 0, which has no data yet",
    ),
    "adds another chunk": (
        programs("all_reduce", [Round((Send(1, A),), (Recv(1, B, True),))], [trade(0)], regions=(2,)),
        r"rank 0, round 0: adds chunk 0 from rank 1 to chunk 1",
    ),
    "an input is lacking": (
        programs("all_reduce", [trade(1)], [trade(0)], []),
        r"rank 0, after round 0: chunk 0 must hold the sum .* but holds chunk 0 of ranks 0, 1",
    ),
    "the wrong chunk": (
        programs(
            "all_to_all",
            [Round((Send(1, A),), (Recv(1, Span(3, 4)),), (Copy(A, Span(2, 3)),))],
            [Round((Send(0, A),), (Recv(0, Span(2, 3)),), (Copy(B, Span(3, 4)),))],
            regions=(2, 2),
        ),
        r"rank 1, after round 0: chunk 2 must hold chunk 1 of rank 0, but holds chunk 0 of rank 0",
    ),
    "the input is changed": (
        programs("all_to_all", [Round(copies=(Copy(A, Span(2, 3)), Copy(B, A)))], [], regions=(2, 2)),
        r"rank 0, after round 0: chunk 0 must hold chunk 0 of rank 0, but holds chunk 1 of rank 0",
    ),
    "added in another order": (
        programs(
            "all_reduce",
            [Round((Send(1, A), Send(2, A)), (Recv(1, A, True), Recv(2, A, True)))],
            [Round((Send(0, A), Send(2, A)), (Recv(0, A, True), Recv(2, A, True)))],
            [Round((Send(0, A), Send(1, A)), (Recv(0, A, True), Recv(1, A, True)))],
        ),
        r"rank 2, after round 0: chunk 0 was summed in another order than on rank 0: "
        r"\(1\+\(0\+2\)\), not \(\(0\+1\)\+2\)",
    ),
    "no signal of a rank": (
        programs("barrier", [trade(1, EMPTY, False)], [trade(0, EMPTY, False)], [], regions=()),
        r"rank 0, after round 0: it has no signal from rank 2",
    ),
    "the root is another": (
        programs("reduce", [recv(1, reduce=True)], [send(0)], root=1),
        r"rank 1, after round 0: chunk 0 must hold the sum",
    ),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_mistakes_are_found(mistake: str) -> None:
    wrong, message = WRONG[mistake]
    with pytest.raises(ScheduleError, match=message):
        verify(wrong)


def test_the_programs_must_belong_together() -> None:
    with pytest.raises(ScheduleError, match="program 1 of 2 does not fit"):
        verify([program("barrier", "dissemination", 0, 2)] * 2)


# Every message of every algorithm, spoilt in every way.

Edit = Callable[[Round], Round]
EVERY = [(verb, name, size) for verb in verbs() for name in algorithms(verb) for size in (2, 3, 4, 5)]


def edited(all_ranks: list[Program], rank: int, index: int, edit: Edit) -> list[Program]:
    rounds = list(all_ranks[rank].rounds)
    rounds[index] = edit(rounds[index])
    changed = list(all_ranks)
    changed[rank] = replace(all_ranks[rank], rounds=tuple(rounds))
    return changed


def without(place: int, side: str) -> Edit:
    return lambda step: replace(step, **{side: getattr(step, side)[:place] + getattr(step, side)[place + 1 :]})


def flipped(place: int) -> Edit:
    def edit(step: Round) -> Round:
        ends = list(step.recvs)
        ends[place] = replace(ends[place], reduce=not ends[place].reduce)
        return replace(step, recvs=tuple(ends))

    return edit


def longer(place: int) -> Edit:
    def edit(step: Round) -> Round:
        ends = list(step.sends)
        span = ends[place].span
        ends[place] = replace(ends[place], span=Span(span.start, span.stop + 1))
        return replace(step, sends=tuple(ends))

    return edit


def messages(all_ranks: list[Program]) -> Iterator[tuple[tuple[int, int, int], tuple[int, int, int]]]:
    """Both ends (rank, round, place) of every message: the n-th send to a rank matches its n-th receive."""
    arrivals: defaultdict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    for p in all_ranks:
        for index, step in enumerate(p.rounds):
            for place, end in enumerate(step.recvs):
                arrivals[end.peer, p.rank].append((p.rank, index, place))
    for p in all_ranks:
        for index, step in enumerate(p.rounds):
            for place, out in enumerate(step.sends):
                yield (p.rank, index, place), arrivals[p.rank, out.peer].pop(0)


def spoilt(good: list[Program]) -> Iterator[tuple[str, list[Program]]]:
    has_data = bool(good[0].regions)
    for sent, received in messages(good):
        (rank, index, place), (target, there, slot) = sent, received
        no_send = edited(good, rank, index, without(place, "sends"))
        yield f"no send {sent}", no_send
        yield f"no receive {received}", edited(good, target, there, without(slot, "recvs"))
        if has_data:  # a barrier of 3 or 5 ranks can do without some messages, and empty ones are neither long nor sums
            yield f"no message {sent} -> {received}", edited(no_send, target, there, without(slot, "recvs"))
            yield f"reduce flipped {received}", edited(good, target, there, flipped(slot))
            yield f"longer {sent}", edited(good, rank, index, longer(place))


@pytest.mark.parametrize(("verb", "name", "size"), EVERY, ids=["-".join(map(str, case)) for case in EVERY])
def test_every_spoilt_message_is_found(verb: str, name: str, size: int) -> None:
    segments = 2 if find(verb, name).segmented else 1
    root = size - 1 if find(verb, name).rooted else 0
    good = [program(verb, name, rank, size, root=root, segments=segments) for rank in range(size)]
    for what, wrong in spoilt(good):
        try:
            verify(wrong)
        except ScheduleError as error:
            assert re.search(r"rank \d+, (after )?round -?\d+", str(error)), (what, str(error))
        else:
            pytest.fail(f"verify accepts {verb} {name} on {size} ranks with {what}")
