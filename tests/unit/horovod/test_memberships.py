"""Process sets as ranks give them: what all must give, and what only the members of a communicator can."""

from __future__ import annotations

from commlib.horovod.memberships import all_sets, who_differs

EVEN, ODD, LOW = (0, 2), (1, 3), (0, 1)


def test_sets_of_a_split_are_numbered_alike_everywhere():
    everyone = [[(EVEN, True)], [(ODD, True)], [(EVEN, True)], [(ODD, True)]]
    assert list(dict.fromkeys(all_sets(everyone))) == [EVEN, ODD]
    assert who_differs(everyone) == ""


def test_lists_may_mix_both_kinds_and_differ_in_length():
    everyone = [
        [(LOW, False), (EVEN, True)],
        [(LOW, False)],
        [(LOW, False), (EVEN, True)],
        [(LOW, False)],
    ]
    assert list(dict.fromkeys(all_sets(everyone))) == [LOW, EVEN]
    assert who_differs(everyone) == ""
    assert who_differs([[], [], []]) == "" and list(all_sets([[], []])) == []


def test_what_is_missing_is_named():
    assert who_differs([[(LOW, False)], []]) == (
        "rank 0 gives a process set of the ranks [0, 1], but rank 1 gives none of them"
    )
    assert who_differs([[(EVEN, True)], [], [(ODD, True)], []]) == (
        "rank 0 gives a communicator of the ranks [0, 2], but rank 2 gives none of them"
    )
