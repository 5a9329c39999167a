"""Process sets as ranks define them: lists on all ranks, communicators on their members."""

from __future__ import annotations

from commlib.horovod.memberships import all_sets, find_difference

EVEN, ODD, LOW = (0, 2), (1, 3), (0, 1)


def test_sets_of_a_split_have_the_same_numbers_on_all_ranks():
    everyone = [[(EVEN, True)], [(ODD, True)], [(EVEN, True)], [(ODD, True)]]
    assert list(dict.fromkeys(all_sets(everyone))) == [EVEN, ODD]
    assert find_difference(everyone) == ""


def test_lists_may_mix_both_kinds_and_differ_in_length():
    everyone = [
        [(LOW, False), (EVEN, True)],
        [(LOW, False)],
        [(LOW, False), (EVEN, True)],
        [(LOW, False)],
    ]
    assert list(dict.fromkeys(all_sets(everyone))) == [LOW, EVEN]
    assert find_difference(everyone) == ""
    assert find_difference([[], [], []]) == "" and list(all_sets([[], []])) == []


def test_missing_definitions_are_named():
    assert find_difference([[(LOW, False)], []]) == (
        "rank 0 passes a process set of the ranks [0, 1], but rank 1 does not"
    )
    assert find_difference([[(EVEN, True)], [], [(ODD, True)], []]) == (
        "rank 0 passes a communicator of the ranks [0, 2], but rank 2 does not"
    )
