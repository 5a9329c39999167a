"""Rows of floats: take them, add them up by token, and multiply them by numbers. See rows.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from commlib.dtypes import name_of
from commlib.kernels.cuda.launcher import Defines, KernelLauncher, pointer_to, u64

_Rows = np.dtype([("here", "u8"), ("there", "u8"), ("factors", "u8"), ("width", "u8")])


def take_rows(
    launcher: KernelLauncher, here: Any, there: Any, factors: Any, places: Any, width: int, target: Any
) -> None:
    """Set row i of `target` to the row at places[i]. Without factors its bits are copied."""
    rows, count = _rows(here, there, factors, width), len(places)
    if factors is None:
        launcher.launch(
            "rows.cu", "take_rows", _defines(target), count, rows, pointer_to(places), u64(count), pointer_to(target)
        )
    else:
        arguments = pointer_to(None), pointer_to(places), u64(count), pointer_to(target)
        launcher.launch("rows.cu", "sum_rows", _defines(target), count, rows, *arguments)


def sum_rows(
    launcher: KernelLauncher, here: Any, there: Any, factors: Any, starts: Any, places: Any, width: int, target: Any
) -> None:
    """Set row t of `target` to the sum of the rows at places[starts[t] : starts[t + 1]]."""
    count = len(starts) - 1
    arguments = pointer_to(starts), pointer_to(places), u64(count), pointer_to(target)
    launcher.launch("rows.cu", "sum_rows", _defines(target), count, _rows(here, there, factors, width), *arguments)


def multiply_rows(
    launcher: KernelLauncher, rows: Any, others: Any, factors: Any, width: int, scaled: Any, products: Any
) -> None:
    """Set `scaled` to rows times factors, and `products` to the dot product of each row with its counterpart."""
    count = len(factors)
    arguments = (
        pointer_to(rows),
        pointer_to(others),
        pointer_to(factors),
        u64(count),
        u64(width),
        pointer_to(scaled),
        pointer_to(products),
    )
    launcher.launch("rows.cu", "multiply_rows", _defines(rows), count, *arguments)


def _rows(here: Any, there: Any, factors: Any, width: int) -> Any:
    rows = np.zeros((), _Rows)
    rows["here"], rows["there"], rows["factors"], rows["width"] = (
        pointer_to(here),
        pointer_to(there),
        pointer_to(factors),
        width,
    )
    return rows


def _defines(x: Any) -> Defines:
    return {"ELEMENT": name_of(x.dtype).capitalize()}
