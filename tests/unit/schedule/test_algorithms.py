"""Every registered algorithm: it is proved correct, and its cost matches its docstring."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from commlib.schedule import Algorithm, LinkCost, algorithms, find, program, simulate, verbs, verify

SIZES = (*range(1, 34), 64, 100)
ALL = [(verb, name) for verb in verbs() for name in algorithms(verb)]
every_algorithm = pytest.mark.parametrize(("verb", "name"), ALL, ids=[f"{verb}-{name}" for verb, name in ALL])


def cases(algorithm: Algorithm, size: int) -> Iterator[tuple[int, int]]:
    """All roots for small sizes, some for large; segments fewer and more than ranks."""
    roots = range(size) if size <= 8 else (0, size // 2, size - 1)
    for root in roots if algorithm.rooted else (0,):
        for segments in (1, 2, 5) if algorithm.segmented else (1,):
            yield root, segments


@every_algorithm
def test_algorithms_are_correct(verb: str, name: str) -> None:
    for size in SIZES:
        for root, segments in cases(find(verb, name), size):
            verify([program(verb, name, rank, size, root=root, segments=segments) for rank in range(size)])


@every_algorithm
def test_costs_match_the_claims(verb: str, name: str) -> None:
    algorithm = find(verb, name)
    for size in SIZES:
        for root, segments in cases(algorithm, size):
            ranks = [tuple(algorithm.rounds(rank, size, root=root, segments=segments)) for rank in range(size)]
            chunks = (algorithm.regions(size, segments) or (1,))[0]
            claimed = algorithm.claims.sent(size, segments) * chunks
            counted = [sum(len(send.span) for step in rounds for send in step.sends) for rounds in ranks]
            assert max(counted) == claimed, (size, root, segments)

            result = simulate(ranks, 1, LinkCost(alpha=1, beta=0))
            assert list(result.sent) == counted
            most = algorithm.claims.rounds(size, segments)
            exact = (segments == 1 and name == "binomial_tree") or not algorithm.claims.at_most
            assert result.time == most if exact else result.time <= most, (size, root, segments)


@every_algorithm
def test_algorithms_describe_themselves(verb: str, name: str) -> None:
    description = find(verb, name).description
    assert description.split("\n")[0].endswith(".")
    for word in ("Rounds:", "Bytes sent per rank:", "Source:"):
        assert word in description, f"{verb} {name} does not state its {word}"


@every_algorithm
def test_one_rank_needs_no_message(verb: str, name: str) -> None:
    assert not any(step.sends or step.recvs for step in program(verb, name, 0, 1).rounds)


@pytest.mark.parametrize("size", [*range(2, 20), 64, 100])
def test_double_tree_uses_both_trees_and_no_rank_works_in_both(size: int) -> None:
    busy: list[set[int]] = [set(), set()]
    for rank in range(size):
        for step in program("all_reduce", "double_tree", rank, size).rounds:
            for recv in step.recvs:
                if recv.reduce:
                    busy[recv.span.start].add(rank)
    assert busy[0] and busy[1]
    assert not busy[0] & busy[1]


def test_segments_of_a_tree_go_up_while_others_go_down() -> None:
    """One round of the root adds an arriving segment and sends an earlier one down."""
    rounds = program("all_reduce", "binomial_tree", 0, 4, segments=3).rounds
    assert any(step.sends and step.recvs for step in rounds)
