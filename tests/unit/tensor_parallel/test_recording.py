"""StepRecording: values get numbers, and lengths remember where they are from."""

from __future__ import annotations

from commlib.tensor_parallel.lengths import attribute, length_at, source_of, sources_of
from commlib.tensor_parallel.recording import StepRecording


def recording():
    return StepRecording(lambda tensor: tensor.shape, lambda tensor: None, line=lambda: "model.py:3")


class Array:
    """A tensor of a framework."""

    def __init__(self, *shape):
        self.shape = shape


def test_lengths_of_a_value_remember_its_dimensions():
    steps, x = recording(), Array(2, 6)
    steps.add("", "given", (), (x,))
    rows, features = steps.lengths_of(steps.number(x), x.shape)
    assert (rows, features) == (2, 6)
    assert sources_of(rows) == {(0, 0)} and sources_of(features) == {(0, 1)}
    assert length_at(features // 2 + rows, {(0, 1): 4}) == 4


def test_attributes_remember_their_names():
    steps = recording()
    lengths = steps.attribute_lengths({"h.0.heads": 8, "width": 16})
    assert lengths == {"h.0.heads": 8, "width": 16} == steps.numbers
    assert {attribute(source) for length in lengths.values() for source in sources_of(length)} == set(lengths)
    assert float(lengths["width"]) == 16 and steps.used == {("", "width"): "model.py:3"}


def test_the_source_of_a_name_is_its_module_and_attribute():
    assert source_of("h.0.heads") == ("h.0", "heads") and source_of("heads") == ("", "heads")
