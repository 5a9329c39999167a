"""Programs of nodes and rails: proved symbolically on clusters of any shape, with the bytes of the cost model."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.cost.hierarchical import RAIL_BYTES, predict_hierarchical
from commlib.cost.model import Machine, best
from commlib.errors import UsageError
from commlib.schedule import LinkCost, Program, ScheduleError, nodes, simulate, verify
from commlib.schedule.expansion import expand, rail_algorithms
from commlib.schedule.hierarchy import HIERARCHICAL, HierarchicalProgram, NodeStep, hierarchical_program, join
from commlib.topology import Topology

# Even and uneven nodes, ranks numbered node by node or in turn, a node with one rank, more nodes than ranks on one.
CLUSTERS = ("0011", "0101", "0110", "00011", "0111", "01021", "001122", "10001", "000001112222", "012")
EVEN = [(2, 2), (2, 4), (3, 4), (4, 2), (4, 8)]
verbs = pytest.mark.parametrize("verb", HIERARCHICAL)


def steps(verb: str, cluster: tuple[tuple[int, ...], ...], rails: int, root: int = 0) -> list[HierarchicalProgram]:
    size = sum(map(len, cluster))
    return [hierarchical_program(verb, cluster, rails, rank, root) for rank in range(size)]


def programs(verb: str, cluster: tuple[tuple[int, ...], ...], rails: int, name: str, root: int = 0) -> list[Program]:
    return [expand(each, name) for each in steps(verb, cluster, rails, root)]


def of_labels(labels: str) -> tuple[tuple[int, ...], ...]:
    return Topology.of([int(label) for label in labels]).nodes


def even(number: int, ranks: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(first, first + ranks)) for first in range(0, number * ranks, ranks))


@verbs
@pytest.mark.parametrize("labels", CLUSTERS)
def test_every_program_fulfils_the_contract_of_its_verb(verb: str, labels: str) -> None:
    cluster = of_labels(labels)
    for rails in range(1, min(map(len, cluster)) + 1):
        for root in range(len(labels)) if verb == "broadcast" else (0,):
            for name in rail_algorithms(verb):
                verify(programs(verb, cluster, rails, name, root))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), labels=st.lists(st.integers(0, 4), min_size=2, max_size=14))
def test_programs_are_right_on_any_cluster(data: st.DataObject, labels: list[int]) -> None:
    cluster = Topology.of(labels).nodes
    verb = data.draw(st.sampled_from(list(HIERARCHICAL)))
    rails = data.draw(st.integers(1, min(map(len, cluster))))
    root = data.draw(st.integers(0, len(labels) - 1)) if verb == "broadcast" else 0
    verify(programs(verb, cluster, rails, data.draw(st.sampled_from(rail_algorithms(verb))), root))


def without(each: HierarchicalProgram, number: int, index: int) -> HierarchicalProgram:
    """Return a program without one transfer of a step, of those before the rail's verb and after it."""
    every = [*each.before, *each.after]
    transfers = every[number].transfers
    every[number] = replace(every[number], transfers=transfers[:index] + transfers[index + 1 :])
    return replace(each, before=tuple(every[: len(each.before)]), after=tuple(every[len(each.before) :]))


@verbs
def test_no_transfer_between_ranks_is_superfluous(verb: str) -> None:
    """Without one of them the contract is broken: the verification looks at every step."""
    whole, name = steps(verb, of_labels("00011"), 2), rail_algorithms(verb)[0]
    for node in ((0, 1, 2), (3, 4)):
        first = whole[node[0]]
        for number, step in enumerate((*first.before, *first.after)):
            for index, transfer in enumerate(step.transfers):
                if transfer.source.rank != transfer.target.rank:
                    broken = [without(each, number, index) if each.rank in node else each for each in whole]
                    with pytest.raises(ScheduleError):
                        verify([expand(each, name) for each in broken])


def busiest(step: NodeStep, *, in_place: bool) -> int:
    """Return the most chunks that a rank combines or copies: not the first operand, and nothing that is in place."""
    taken = Counter[int]()
    for each in step.transfers:
        is_local = each.source.rank == each.target.rank
        taken[each.target.rank] += len(each.target.span) * (not is_local or not (step.reduce or in_place))
    return max(taken.values(), default=0)


@verbs
@pytest.mark.parametrize(("number", "ranks"), EVEN)
@pytest.mark.parametrize("all_rails", [True, False])
def test_the_cost_model_has_the_bytes_of_the_steps(verb: str, number: int, ranks: int, all_rails: bool) -> None:
    """At a second for each byte that is combined or copied; messages cost nothing."""
    rails, free, name = ranks if all_rails else 1, LinkCost(0.0, 0.0), rail_algorithms(verb)[0]
    nbytes = rails * RAIL_BYTES
    everyone = steps(verb, even(number, ranks), rails, ranks - 1 if verb == "broadcast" else 0)
    # Where every rank has all of the data, the rail's buffers are parts of it.
    whole = everyone[0].is_whole
    most = [
        max(sum(busiest(step, in_place=whole) for step in getattr(each, phase)) for each in everyone)
        for phase in ("before", "after")
    ]
    between = nbytes * ranks / rails if verb == "all_to_all" else nbytes / rails
    _, network = best(verb, name, number, 0 if verb == "barrier" else between, free, 1.0)
    predicted = predict_hierarchical(verb, name, number, ranks, nbytes, Machine(free, free, 1.0))
    assert predicted == pytest.approx(sum(most) / (rails if whole else number * ranks) * nbytes + network)


@pytest.mark.parametrize(("number", "ranks"), EVEN)
@pytest.mark.parametrize(
    ("verb", "name"),
    [
        ("all_reduce", "ring"),
        ("reduce_scatter", "ring"),
        ("all_gather", "ring"),
        ("broadcast", "binomial_tree"),
        ("all_to_all", "pairwise"),
    ],
)
def test_no_byte_crosses_the_network_more_often_than_it_must(verb: str, name: str, number: int, ranks: int) -> None:
    """In all as many times the data as among the nodes without their ranks; of an all_to_all what nodes do not keep."""
    everyone = programs(verb, even(number, ranks), ranks, name)
    crossing = [
        len(send.span)
        for each in everyone
        for step in each.rounds
        for send in step.sends
        if send.peer // ranks != each.rank // ranks
    ]
    times = {"all_reduce": 2 * (number - 1), "all_to_all": ranks * (number - 1)}
    assert Fraction(sum(crossing), everyone[0].regions[0]) == times.get(verb, number - 1)


def test_a_node_has_its_own_links_in_a_simulation() -> None:
    """All rails cross at once, in two rounds; before and after, three messages of a node's ranks follow one another."""
    everyone = programs("all_reduce", even(2, 4), 4, "direct")
    local, network = LinkCost(1.0, 0.0), LinkCost(100.0, 0.0)
    assert simulate([each.rounds for each in everyone], 1.0, nodes(4, local, network)).time == 3 + 2 * 100 + 3


@verbs
@pytest.mark.parametrize("labels", CLUSTERS)
def test_the_bounds_of_slots_and_rails_hold(verb: str, labels: str) -> None:
    cluster = of_labels(labels)
    for rails in range(1, min(map(len, cluster)) + 1):
        for each in steps(verb, cluster, rails):
            for step in (*each.before, *each.after):
                published = {(transfer.source.rank, transfer.source) for transfer in step.transfers}
                given = Counter(rank for rank, part in published if len(part.span))
                assert max(given.values(), default=0) <= each.slot_chunks
            for buffer in ("outgoing", "incoming"):
                assert len(each.chunks(each.rank, buffer)) <= each.rail_chunks


def test_wrong_arguments_are_refused() -> None:
    cluster = of_labels("00011")
    with pytest.raises(UsageError, match="scan has no hierarchical form; expected one of all_reduce"):
        hierarchical_program("scan", cluster, 1, 0)
    with pytest.raises(UsageError, match=r"rails must be in 1\.\.2, the size of the smallest node, got 3"):
        hierarchical_program("all_reduce", cluster, 3, 0)
    with pytest.raises(UsageError, match=r"rank must be in 0\.\.4, got 5"):
        hierarchical_program("all_reduce", cluster, 1, 5)
    with pytest.raises(UsageError, match=r"root must be in 0\.\.4, got 9"):
        hierarchical_program("broadcast", cluster, 1, 0, 9)
    with pytest.raises(UsageError, match="'bruck' does not run between nodes; expected one of pairwise"):
        expand(hierarchical_program("all_to_all", cluster, 1, 0), "bruck")


def test_runs_that_continue_each_other_are_joined() -> None:
    assert join([(0, 5, 2), (2, 7, 1), (3, 9, 1), (4, 10, 2)]) == [(0, 5, 3), (3, 9, 3)]
    assert join([]) == []
