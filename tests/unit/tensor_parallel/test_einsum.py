"""Equations of einsum layers: the divisible dimensions of a kernel, and their places in inputs and outputs."""

from __future__ import annotations

import pytest

from commlib.errors import UsageError
from commlib.tensor_parallel.einsum import Einsum, EinsumDim


@pytest.mark.parametrize(
    ("equation", "columns", "rows"),
    [
        ("abc,cde->abde", [("d", 1, 2), ("e", 2, 3)], [("c", 0, 2)]),
        ("abcd,cde->abe", [("e", 2, 2)], [("c", 0, 2), ("d", 1, 3)]),
        ("bqm,muh->bquh", [("u", 1, 2), ("h", 2, 3)], [("m", 0, 2)]),
        ("...x,xy->...y", [("y", 1, -1)], [("x", 0, -1)]),
        ("...xz,xzyw->...yw", [("y", 2, -2), ("w", 3, -1)], [("x", 0, -2), ("z", 1, -1)]),
        ("ax..., xy -> ay...", [("y", 1, 1)], [("x", 0, 1)]),
        ("abc,ace->abe", [("e", 2, 2)], [("c", 1, 2)]),  # a is in all terms: neither
        ("abc,c->abc", [], []),
    ],
)
def test_dimensions_have_places(
    equation: str, columns: list[tuple[str, int, int]], rows: list[tuple[str, int, int]]
) -> None:
    parsed = Einsum.of("layer", equation)
    assert parsed.columns == tuple(EinsumDim(*one) for one in columns)
    assert parsed.rows == tuple(EinsumDim(*one) for one in rows)


@pytest.mark.parametrize(
    ("equation", "axes", "letter", "dim"),
    [
        ("abc,cde->abde", "de", "d", 0),
        ("abc,cde->abde", "de", "e", 1),
        ("abc,cde->abde", "e", "d", None),
        ("abc,cde->abde", "bde", "d", 1),
        ("abc,cde->abde", "be", "e", 2),
        ("...x,xy->...y", "y", "y", 0),
        ("ax...,xy->ay...", "y", "y", 0),
    ],
)
def test_a_bias_has_a_divided_dimension(equation: str, axes: str, letter: str, dim: int | None) -> None:
    assert Einsum.of("layer", equation).bias(letter, axes) == dim


@pytest.mark.parametrize("equation", ["ab,bc", "ab,bc,cd->ad", "ab,b...->a...", "", "ab->a"])
def test_invalid_equations_are_refused(equation: str) -> None:
    with pytest.raises(UsageError, match="expected an input, a kernel and an output"):
        Einsum.of("layer", equation)
