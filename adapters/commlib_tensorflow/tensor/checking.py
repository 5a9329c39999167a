"""Checking: hold a plan of a Keras model against the rules, before it is divided or at its first call."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Mapping
from typing import Any

import keras
import tensorflow as tf

from commlib.communicator import Communicator
from commlib.errors import UsageError
from commlib.functional.axis import Axis
from commlib.functional.checks import check_first_call, check_parts, not_checked
from commlib.functional.division import Division
from commlib.functional.guide import Guide
from commlib.functional.runs import Outputs, Run
from commlib.tensor.styles import Style
from commlib.tensor.trace import Trace
from commlib_tensorflow.tensor._forward import can_run_whole, forward
from commlib_tensorflow.tensor._numbers import styles_of_numbers
from commlib_tensorflow.tensor._runs import ran
from commlib_tensorflow.tensor.layers import check_layers, find_layer
from commlib_tensorflow.tensor.names import layers_of
from commlib_tensorflow.tensor.tracing import Layers, attempted, concrete, styles_in


class Traced:
    """A model of Keras for `commlib.functional.checks`: a call is what it is called with, or specs of that."""

    def __init__(self, model: Any, layers: Layers, axis: Axis | None = None) -> None:
        self._model, self._layers, self._axis = model, layers, axis
        self._hidden: list[str] = []

    def attempt(self, call: Any, styles: Collection[str]) -> tuple[Trace, Exception | None]:
        """Return the model's trace."""
        return attempted(self._model, self._layers, call, styles, self._hidden)

    def warn(self) -> None:
        """Warn of layers that the rules have not seen, once."""
        if self._hidden:
            names, self._hidden = ", ".join(dict.fromkeys(self._hidden)), []
            warnings.warn(
                f"plan: {names} run in a loop, a branch or a function of TensorFlow, which the rules cannot look into: "
                "give verify=, which compares numbers",
                stacklevel=3,
            )

    def run(self, call: Any, styles: Collection[str], outputs: Outputs) -> Run:
        """Run the model forward and backward."""
        return ran(self._model, self._layers, call, styles, outputs)

    def forward(self, call: Any, styles: Mapping[str, Style], guide: Guide | None, *, evaluate: bool) -> Run | None:
        """Run the model forward, as a whole or as one rank."""
        if self._axis is None or not can_run_whole(self._layers, self._axis):
            return None
        return forward(self._model, self._layers, self._axis, call, styles, guide)

    def room(self) -> int:
        """Return any number: only the host's memory is counted."""
        return sys.maxsize

    def styles(self) -> dict[str, Style]:
        """Return the styles of the layers that are divided."""
        return styles_in(self._layers) | styles_of_numbers(self._model, self._layers)

    def check_layer(self, name: str, style: Style, axis: Axis) -> None:
        """Raise UsageError unless a layer can be divided in a style among the ranks of an axis."""
        layer = self._layers[name]
        check_layers([(name, layer, style, find_layer(name, layer, style))], Division(axis))


def known_call(model: Any) -> Any:
    """Return specs of what a functional or Sequential model is called with; None for other models.

    Lengths that the model leaves open get some number.
    """
    if isinstance(model, keras.Sequential):
        given = model.inputs[0] if model.built else None
    else:
        given = getattr(model, "_inputs_struct", None)  # `inputs` has lost the names of a dict
    return None if given is None else keras.tree.map_structure(_spec, given)


def _spec(one: Any) -> tf.TensorSpec:
    return tf.TensorSpec(concrete(one.shape), one.dtype)


class Unchecked:
    """What the layers of a model have whose plan is to be checked yet. model: its name."""

    def __init__(self, model: str, *, warns: bool) -> None:
        self._model, self.warns = model, warns
        self.done = self.is_checking = False

    def used(self, name: str) -> None:
        """Hear that a divided layer is used: warn, once, if that is not within a call that is checked."""
        if self.warns and not (self.done or self.is_checking):
            self.warns = False
            warnings.warn(not_checked(self._model, name), stacklevel=4)


def check_stages(comm: Communicator, graph: Any) -> None:
    """Check the plan of the divided layers of a model that a pipeline calls part by part, if nobody has yet.

    graph: a functional model, which is within the one that was divided. Collective over `comm`.
    """
    layers = layers_of(graph)
    if not styles_in(layers):
        return
    given = (getattr(layer, "plan_check", None) for layer in layers.values())
    left = [one for one in given if isinstance(one, Unchecked) and not one.done]
    traced, warns = Traced(graph, layers), any(one.warns for one in left)
    check_parts(comm, traced, known_call(graph), checked=not left, divided_output=True, warns=warns)
    for one in left:
        one.done = True


def check_at_first_call(model: Any, layers: Layers, axis: Axis, *, divided_output: bool) -> None:
    """Check a divided model's plan when it is called for the first time, before that call."""
    unchecked = Unchecked(type(model).__name__, warns=axis.rank == 0)
    for name in styles_in(layers):
        layers[name].plan_check = unchecked

    def call(inputs: Any, *args: Any, **options: Any) -> Any:
        del model.call  # that of the class is left
        traced = Traced(model, layers, axis)
        unchecked.is_checking = True
        try:
            check_first_call(axis, traced, inputs, divided_output=divided_output, warns=unchecked.warns)
            if unchecked.warns:
                traced.warn()
            unchecked.done = True
        except UsageError as error:
            raise UsageError(str(error)) from error  # Keras adds to its text, and needs a class that takes that alone
        finally:
            unchecked.is_checking = False
            if not unchecked.done:
                model.call = call  # which refuses it again
        return model.call(inputs, *args, **options)

    model.call = call
