"""Rows of floats: taken, added up for the tokens that they belong to, multiplied by numbers. See rows.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from commlib.dtypes import name_of
from commlib.kernels.cuda.arguments import at, u64
from commlib.kernels.cuda.launcher import Defines, Launcher

_Rows = np.dtype([("here", "u8"), ("there", "u8"), ("factors", "u8"), ("width", "u8")])


def take_rows(launcher: Launcher, here: Any, there: Any, factors: Any, places: Any, width: int, target: Any) -> None:
    """Let row i of `target` be the one at places[i]. Without factors its bits are copied."""
    rows, count = _rows(here, there, factors, width), len(places)
    if factors is None:
        launcher.launch("rows.cu", "take_rows", _defines(target), count, rows, at(places), u64(count), at(target))
    else:
        arguments = at(None), at(places), u64(count), at(target)
        launcher.launch("rows.cu", "sum_rows", _defines(target), count, rows, *arguments)


def sum_rows(
    launcher: Launcher, here: Any, there: Any, factors: Any, starts: Any, places: Any, width: int, target: Any
) -> None:
    """Let row t of `target` be the sum of those at places[starts[t] : starts[t + 1]]."""
    count = len(starts) - 1
    arguments = at(starts), at(places), u64(count), at(target)
    launcher.launch("rows.cu", "sum_rows", _defines(target), count, _rows(here, there, factors, width), *arguments)


def multiply_rows(
    launcher: Launcher, rows: Any, others: Any, factors: Any, width: int, scaled: Any, products: Any
) -> None:
    """Let `scaled` be rows times factors, and `products` the scalar product of each row with its other."""
    count = len(factors)
    arguments = at(rows), at(others), at(factors), u64(count), u64(width), at(scaled), at(products)
    launcher.launch("rows.cu", "multiply_rows", _defines(rows), count, *arguments)


def _rows(here: Any, there: Any, factors: Any, width: int) -> Any:
    rows = np.zeros((), _Rows)
    rows["here"], rows["there"], rows["factors"], rows["width"] = at(here), at(there), at(factors), width
    return rows


def _defines(x: Any) -> Defines:
    return {"ELEMENT": name_of(x.dtype).capitalize()}
