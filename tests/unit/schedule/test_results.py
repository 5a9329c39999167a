"""Programs run on real numbers, by an interpreter that shares nothing with the replay of `verify`."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.schedule import EMPTY, Layout, Program, Recv, Send, Span, algorithms, even, find, program, uneven

Memory = list[list[float]]  # of one rank: a list of elements for each region
Channel = tuple[int, int]


def run(programs: Sequence[Program], layouts: Sequence[Sequence[Layout]], memories: Sequence[Memory]) -> None:
    """Run all programs in place; `layouts[rank][region]`. Fails if they halt or if lengths differ."""

    def at(rank: int, span: Span) -> tuple[list[float], slice]:
        first = 0
        for region, chunks in enumerate(programs[rank].regions):
            if first <= span.start and span.stop <= first + chunks:
                local = Span(span.start - first, span.stop - first)
                return memories[rank][region], slice(*layouts[rank][region].slice(local))
            first += chunks
        assert span == EMPTY
        return [], slice(0, 0)

    sent: defaultdict[Channel, list[list[float]]] = defaultdict(list)
    wanted: defaultdict[Channel, int] = defaultdict(int)
    position = [-1] * len(programs)
    sends: list[list[tuple[Channel, int]]] = [[] for _ in programs]
    recvs: list[list[tuple[Channel, int, Recv]]] = [[] for _ in programs]

    def post(rank: int) -> None:
        position[rank] += 1
        sends[rank], recvs[rank] = [], []
        if position[rank] == len(programs[rank].rounds):
            return
        step = programs[rank].rounds[position[rank]]
        for copy in step.copies:
            source, target = at(rank, copy.source), at(rank, copy.target)
            elements = source[0][source[1]]
            assert len(elements) == len(target[0][target[1]])
            target[0][target[1]] = elements
        for send in step.sends:
            memory, where = at(rank, send.span)
            channel = rank, send.peer
            sends[rank].append((channel, len(sent[channel])))
            sent[channel].append(memory[where])
        for recv in step.recvs:
            channel = recv.peer, rank
            recvs[rank].append((channel, wanted[channel], recv))
            wanted[channel] += 1

    def finish(rank: int) -> bool:
        """End the round if all its messages are matched; sends of this rank count only once they are received."""
        if position[rank] == len(programs[rank].rounds):
            return False
        if any(wanted[channel] <= number for channel, number in sends[rank]):
            return False
        if any(len(sent[channel]) <= number for channel, number, _ in recvs[rank]):
            return False
        for channel, number, recv in recvs[rank]:
            memory, where = at(rank, recv.span)
            mine, arrived = memory[where], sent[channel][number]
            assert len(mine) == len(arrived)
            if recv.reduce:
                arrived = [a + b if recv.peer < rank else b + a for a, b in zip(arrived, mine, strict=True)]
            memory[where] = arrived
        return True

    for rank in range(len(programs)):
        post(rank)
    moving = True
    while moving:
        moving = False
        for rank in range(len(programs)):
            while finish(rank):
                moving = True
                post(rank)
    assert position == [len(p.rounds) for p in programs], "halted"


def make(verb: str, name: str, size: int, root: int, segments: int) -> list[Program]:
    chosen = find(verb, name)
    root, segments = root if chosen.rooted else 0, segments if chosen.segmented else 1
    return [program(verb, name, rank, size, root=root, segments=segments) for rank in range(size)]


one_region = [
    (verb, name)
    for verb in ("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "gather", "scatter")
    for name in algorithms(verb)
]


@pytest.mark.parametrize(("verb", "name"), one_region, ids=[f"{verb}-{name}" for verb, name in one_region])
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_programs_in_one_region_give_the_result(verb: str, name: str, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 12), "size")
    root = data.draw(st.integers(0, size - 1), "root")
    programs = make(verb, name, size, root, data.draw(st.integers(1, 4), "segments"))
    chunks = programs[0].regions[0]
    if data.draw(st.booleans(), "is uneven"):
        layout = uneven(data.draw(st.lists(st.integers(0, 4), min_size=chunks, max_size=chunks), "counts"))
    else:
        layout = even(data.draw(st.integers(0, 40), "count"), chunks)

    inputs = [[random.uniform(-1, 1) * 10 ** random.randrange(8) for _ in range(layout.count)] for _ in range(size)]
    memories: list[Memory] = [[list(elements)] for elements in inputs]
    if verb in ("all_gather", "gather"):
        for rank in range(size):
            mine = range(*layout.slice(Span(rank, rank + 1)))
            memories[rank][0] = [x if i in mine else float("nan") for i, x in enumerate(inputs[rank])]
    run(programs, [[layout]] * size, memories)

    got = [memory[0] for memory in memories]
    starts = list(pairwise(layout.offsets))
    total = [sum(column) for column in zip(*inputs, strict=True)]
    close = pytest.approx
    match verb:
        case "all_reduce":
            assert got[0] == close(total, rel=1e-9, abs=1e-3)
            assert all(elements == got[0] for elements in got), "not bitwise the same everywhere"
        case "reduce":
            assert got[programs[0].root] == close(total, rel=1e-9, abs=1e-3)
        case "reduce_scatter":
            for rank, (start, stop) in enumerate(starts):
                assert got[rank][start:stop] == close(total[start:stop], rel=1e-9, abs=1e-3)
        case "broadcast":
            assert all(elements == inputs[root] for elements in got)
        case "scatter":
            for rank, (start, stop) in enumerate(starts):
                assert got[rank][start:stop] == inputs[root][start:stop]
        case "all_gather" | "gather":
            gathered = [x for rank, (start, stop) in enumerate(starts) for x in inputs[rank][start:stop]]
            assert all(got[rank] == gathered for rank in (range(size) if verb == "all_gather" else [root]))


@pytest.mark.parametrize("name", algorithms("all_to_all"))
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_all_to_all_programs_give_the_result(name: str, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 12), "size")
    programs = make("all_to_all", name, size, 0, 1)
    same = data.draw(st.integers(0, 3), "chunk")
    counts = [[same] * size for _ in range(size)]
    if not find("all_to_all", name).even_only:
        row = st.lists(st.integers(0, 3), min_size=size, max_size=size)
        counts = data.draw(st.lists(row, min_size=size, max_size=size), "counts")

    scratch = [uneven([same] * chunks) for chunks in programs[0].regions[2:]]
    layouts = [
        [uneven(counts[rank]), uneven(counts[source][rank] for source in range(size)), *scratch] for rank in range(size)
    ]
    letter = {(s, d, i): float(s * 10000 + d * 100 + i) for s in range(size) for d in range(size) for i in range(3)}
    memories: list[Memory] = [[[float("nan")] * layout.count for layout in row] for row in layouts]
    for rank in range(size):
        memories[rank][0] = [letter[rank, d, i] for d in range(size) for i in range(counts[rank][d])]
    before = [list(memory[0]) for memory in memories]
    run(programs, layouts, memories)
    for rank in range(size):
        assert memories[rank][1] == [letter[s, rank, i] for s in range(size) for i in range(counts[s][rank])]
        assert memories[rank][0] == before[rank], "the input was changed"


def test_the_interpreter_notices_a_halt() -> None:
    good = make("broadcast", "chain", 2, 0, 1)
    sender = Program("broadcast", "chain", 0, 2, 0, (1,), ())
    assert isinstance(good[0].rounds[0].sends[0], Send)
    with pytest.raises(AssertionError, match="halted"):
        run([sender, good[1]], [[even(1, 1)]] * 2, [[[1.0]], [[2.0]]])
