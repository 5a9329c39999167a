"""Plans: the layers that a pattern names, and errors for wrong patterns."""

from __future__ import annotations

from typing import Any

import pytest

from commlib.errors import UsageError
from commlib.tensor_parallel import Column, PerRank, Plan, Replicate, Row, Sequence, Vocabulary, resolve

NAMES = ["", "embed", "layers", "layers.0", "layers.0.up", "layers.0.down", "layers.1", "layers.1.up", "layers.1.down"]


def test_patterns_name_layers_in_their_order() -> None:
    resolved = resolve({"*.down": Row(), "layers.*.up": Column(), "embed": Vocabulary()}, NAMES)
    assert resolved == {
        "embed": Vocabulary(), "layers.0.up": Column(), "layers.0.down": Row(), "layers.1.up": Column(),
        "layers.1.down": Row(),
    }  # fmt: skip


def test_a_full_name_wins_over_a_pattern() -> None:
    resolved = resolve({"*.up": Column(), "layers.1.up": Replicate()}, NAMES)
    assert resolved == {"layers.0.up": Column(), "layers.1.up": Replicate()}


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ({"layer.*.up": Column()}, "no layer is called 'layer.*.up'; there are layers"),
        (
            {"*.up": Column},
            "'*.up' is <class 'commlib.tensor_parallel.styles.Column'>, expected an instance of Column, Row",
        ),
        ([Column()], "plan: expected a mapping of layers' names to Column, got list"),
        ({"*.up": Column(), "layers.1.*": Row()}, "layers.1.up has several styles: '*.up': Column"),
    ],
)
def test_wrong_plans_are_refused(plan: Any, text: str) -> None:
    with pytest.raises(UsageError) as error:
        resolve(plan, NAMES)
    assert text in str(error.value)


def test_the_model_itself_has_no_name() -> None:
    """Regression: a list of layers began with nothing."""
    with pytest.raises(UsageError, match=r"called 'mpl'; there are the model itself, first, \.\.\."):
        resolve({"mpl": Column()}, ["", "first"])
    with pytest.raises(UsageError, match=r"plan: the model itself has several styles"):
        resolve({"*": Column(), "**": Row()}, ["", "first"])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Column(parts=(4, 0)), "Column: parts are [4, 0]"),
        (lambda: Column(units=-1), "Column: units is -1"),
        (lambda: Row(sequence=True), "Row: the dimension of the sequence is True"),
        (lambda: Column(sequence=True), "Column: the dimension of the sequence is True"),
        (
            lambda: Sequence("1"),  # type: ignore[arg-type]
            "Sequence: the dimension of the sequence is '1'",
        ),
    ],
)
def test_wrong_styles_are_refused(make: Any, text: str) -> None:
    with pytest.raises(UsageError) as error:
        make()
    assert text in str(error.value)


def test_parts_may_be_a_list() -> None:
    assert Column(parts=[4, 2, 2]) == Column(parts=(4, 2, 2))  # type: ignore[arg-type]


def test_plans_can_name_numbers_of_modules():
    """Only `PerRank` applies to numbers, and it applies to nothing else."""
    layers, numbers = ["h.0.attn", "h.0.attn.qkv"], ["h.0.attn.heads", "h.0.attn.size"]
    plan: Plan = {"*.qkv": Column(), "*.attn.*": PerRank(4)}
    resolved = resolve(plan, layers, numbers=numbers)
    assert resolved == {"h.0.attn.qkv": Column(), **dict.fromkeys(numbers, PerRank(4))}
    with pytest.raises(UsageError, match="no number is called 'qkv'"):
        resolve({"qkv": PerRank()}, layers, numbers=numbers)
    with pytest.raises(UsageError, match=r"no layer is called '\*.heads'"):
        resolve({"*.heads": Column()}, layers, numbers=numbers)
    assert [PerRank(4).own(64, rank, 3) for rank in range(3)] == [32, 16, 16]
