"""Rows of floats: take them, add them up by token, and multiply them by numbers. See rows.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from commlib.dtypes import name_of
from commlib.kernels.cuda.arguments import pointer_to, u64
from commlib.kernels.cuda.launcher import Defines, LaunchedKernels

_Rows = np.dtype([("here", "u8"), ("there", "u8"), ("factors", "u8"), ("width", "u8")])


class RowKernels(LaunchedKernels):
    def take_rows(self, here: Any, there: Any, factors: Any, places: Any, width: int, target: Any) -> None:
        # Without factors the bits of the rows are copied.
        rows, count = _rows(here, there, factors, width), len(places)
        if factors is None:
            self._launch(
                "rows.cu",
                "take_rows",
                _defines(target),
                count,
                rows,
                pointer_to(places),
                u64(count),
                pointer_to(target),
            )
        else:
            arguments = pointer_to(None), pointer_to(places), u64(count), pointer_to(target)
            self._launch("rows.cu", "sum_rows", _defines(target), count, rows, *arguments)

    def sum_rows(self, here: Any, there: Any, factors: Any, starts: Any, places: Any, width: int, target: Any) -> None:
        count = len(starts) - 1
        arguments = pointer_to(starts), pointer_to(places), u64(count), pointer_to(target)
        self._launch("rows.cu", "sum_rows", _defines(target), count, _rows(here, there, factors, width), *arguments)

    def multiply_rows(self, rows: Any, others: Any, factors: Any, width: int, scaled: Any, products: Any) -> None:
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
        self._launch("rows.cu", "multiply_rows", _defines(rows), count, *arguments)


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
