"""Layouts of variables, as Keras' LayoutMap has them, become styles of layers."""

from __future__ import annotations

from typing import Any

import pytest

from commlib.errors import UsageError
from commlib.tensor_parallel import Column, Row, Vocabulary
from commlib.tensor_parallel.layout_map import divided_dims, is_layout_map, style_of

VARIABLES = [("model/up/kernel", 2), ("model/up/bias", 1), ("model/down/kernel", 2), ("model/words/embeddings", 2)]


def test_both_kinds_of_plans_give_styles() -> None:
    assert is_layout_map({"up/kernel": (None, "tp")})
    assert not is_layout_map({"up": Column()})
    assert not is_layout_map({})
    with pytest.raises(UsageError, match="use only one kind"):
        is_layout_map({"up": Column(), "down/kernel": ("tp", None)})


def test_dimensions_give_styles() -> None:
    layouts = {"up/kernel": (None, "tp"), "model/up/bias": ("tp",), "(down|words)/": ("tp", None)}
    assert divided_dims(layouts, VARIABLES) == [1, 0, 0, 0]
    assert divided_dims({"kernel": (None, None)}, VARIABLES) == [None] * 4
    whole_path_first = {"kernel": (None, "tp"), "model/down/kernel": ("tp", None)}
    assert divided_dims(whole_path_first, VARIABLES) == [1, None, 0, None]


@pytest.mark.parametrize(
    ("layouts", "match"),
    [
        ({"middle/kernel": (None, "tp")}, "no path of a variable matches 'middle/kernel'"),
        ({"up/kernel": (None, "tp"), "up/k": (None, "tp")}, "several layouts"),
        ({"up/kernel": ("tp",)}, "has 2 dimensions, its layout"),
        ({"up/kernel": ("tp", "tp")}, "one sharded dimension"),
        ({"up/kernel": (None, "tp"), "down/kernel": ("dp", None)}, "name the axes dp, tp"),
    ],
)
def test_mismatched_layouts_are_refused(layouts: Any, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        divided_dims(layouts, VARIABLES)


def test_styles_match_the_layouts() -> None:
    kernel, bias = ("inputs", "outputs"), ("outputs",)
    assert style_of([("kernel", kernel, 1), ("bias", bias, None)]) == Column()
    assert style_of([("kernel", kernel, 1), ("bias", bias, 0)]) == Column()
    assert style_of([("kernel", kernel, 0), ("bias", bias, None)]) == Row()
    assert style_of([("embeddings", ("words", "outputs"), 0)]) == Vocabulary()
    assert style_of([("kernel", kernel, None), ("bias", bias, None)]) is None
    for dim in (0, None):
        with pytest.raises(UsageError, match="bias is sharded along 0, but kernel is not"):
            style_of([("kernel", kernel, dim), ("bias", bias, 0)])
    with pytest.raises(UsageError, match="cannot be sharded along 0, expected 1 or 2"):
        style_of([("kernel", (None, *kernel), 0)])
