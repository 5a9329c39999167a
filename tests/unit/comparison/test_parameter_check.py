"""Different parameters are an error on all ranks, with the first difference."""

import pytest

from commlib.comparison.parameter_check import check_agreement, renumber
from commlib.errors import MismatchError
from tests.unit.data_parallel.fake import FakeComm, FakeWorld


@pytest.mark.parametrize("size", [1, 2, 3])
def test_equal_parameters_pass(size: int) -> None:
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
def test_every_rank_raises_the_first_difference(odd: list[str], message: str) -> None:
    def rank(comm: FakeComm) -> None:
        with pytest.raises(MismatchError, match=message):
            check_agreement(comm, "parameters", odd if comm.rank == 2 else ["w (2, 3)", "b (3,)"])

    FakeWorld(3).run(rank)


_UNNUMBERED, _NUMBERED = ["dense/bias", "dense_1/bias"], ["dense_4/bias", "dense_5/bias"]


def test_names_may_start_from_other_numbers() -> None:
    """Keras does this on a rank that has created other layers before; order and differences are the same."""

    def names(first: int, *steps: int) -> list[str]:
        return [f"sequential/dense_{first + number}/kernel: float32[2]" for number in steps]

    def rank(comm: FakeComm) -> None:
        check_agreement(comm, "parameters", ["mean"], counted=names(3 * comm.rank, 0, 1))
        check_agreement(comm, "parameters", [], counted=_UNNUMBERED if comm.rank else _NUMBERED)
        for other in (names(9, 0, 2), names(9, 1, 0), names(9, 0), names(9, 0, 1, 2)):
            with pytest.raises(MismatchError):
                check_agreement(comm, "parameters", [], counted=other if comm.rank else names(0, 0, 1))
        with pytest.raises(MismatchError, match="'block_1' on rank 0 but 'block_2' on rank 1"):
            check_agreement(comm, "parameters", [f"block_{comm.rank + 1}"])

    with pytest.warns(UserWarning, match="treated as equal") as notices:
        FakeWorld(2).run(rank)
    assert len(notices) == 2  # rank 0's, of names that have passed


def test_each_kind_of_name_has_its_own_start() -> None:
    assert renumber(["a_7/w_1: float32[3]", "b/w_2", "a_9"]) == ["a_0/w_0: float32_0[3]", "b_0/w_1", "a_2"]
