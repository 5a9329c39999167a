"""Ranks that hold different parameters are told so, all of them, with the first difference."""

import pytest

from commlib.data_parallel import check_agreement
from commlib.errors import MismatchError

from .fake import FakeComm, FakeWorld


@pytest.mark.parametrize("size", [1, 2, 3])
def test_agreement(size: int) -> None:
    FakeWorld(size).run(lambda comm: check_agreement(comm, "parameters", ["w (2, 3) float32", "b (3,) float32"]))


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (["w (2, 3)", "b (4,)"], r"entry 1 is 'b \(3,\)' on rank 0 but 'b \(4,\)' on rank 2"),
        (["b (3,)"], r"'w \(2, 3\)' is on ranks \[0, 1\], but not on ranks \[2\]"),
        (["w (2, 3)", "v", "b (3,)"], r"'v' is on ranks \[2\], but not on ranks \[0, 1\]"),
        (["w (2, 3)"], r"rank 0 has 2 entries and rank 2 has 1: 'b \(3,\)' is only on rank 0"),
        (["w (2, 3)", "b (3,)", "v"], r"rank 0 has 2 entries and rank 2 has 3: 'v' is only on rank 2"),
    ],
)
def test_every_rank_hears_of_the_first_difference(odd: list[str], message: str) -> None:
    def rank(comm: FakeComm) -> None:
        with pytest.raises(MismatchError, match=message):
            check_agreement(comm, "parameters", odd if comm.rank == 2 else ["w (2, 3)", "b (3,)"])

    FakeWorld(3).run(rank)
