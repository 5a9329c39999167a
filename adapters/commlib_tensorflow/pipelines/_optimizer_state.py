"""Optimizer state: the state that a Keras optimizer has for a weight moves with that weight, however a model is cut.

An optimizer may be nested: a MultiOptimizer contains others, each for some of the weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib_tensorflow._bridge import to_array
from commlib_tensorflow._shards import own_of
from commlib_tensorflow._variables import path_of
from commlib_tensorflow.pipelines._updates import lists_of, singles_of


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """State of one optimizer. level: 0, or 1 if it is inside another one. places: the model indices of its weights.

    singles: state for all weights, such as iterations; lists: state for each weight, None where there is none.
    """

    level: int
    places: Sequence[int]
    singles: Mapping[str, Array]
    lists: Mapping[str, Sequence[Array | None]]


def states_of(optimizer: Any, places: Mapping[int, int], whole: Callable[[Any, Array], Array]) -> list[OptimizerState]:
    """Return the state of an optimizer and of those inside it; nothing, if it is not built.

    places: the indices of the model's variables, by their id. whole: gathers the state of a sharded weight to that of
    the unsharded one.
    """
    states = []
    for level, one in _optimizers(optimizer):
        weights, singles, lists = one._trainable_variables, singles_of(one), lists_of(one)
        known = {id(v) for v in [*singles.values(), *(v for own in lists.values() for v in own)]}
        if unknown := [variable.path for variable in one._variables if id(variable) not in known]:
            warnings.warn(
                f"pipeline: {type(one).__name__} keeps {unknown[0]!r} neither as an attribute nor in a list with one "
                "entry for each weight, so the weight it belongs to is unknown: it is not saved in the file",
                stacklevel=3,
            )
        values = {
            name: [_gather(whole, *pair) for pair in zip(weights, own, strict=True)] for name, own in lists.items()
        }
        arrays = {name: to_array(tf.convert_to_tensor(variable.value)) for name, variable in singles.items()}
        states.append(OptimizerState(level, [places[id(weight)] for weight in weights], arrays, values))
    return states


def _gather(whole: Callable[[Any, Array], Array], weight: Any, slot: Any) -> Array | None:
    return None if slot is None else whole(weight, to_array(tf.convert_to_tensor(slot.value)))


def put_states(optimizer: Any, states: Sequence[OptimizerState], places: Mapping[int, int]) -> None:
    """Load state that other ranks had for the same weights into a built optimizer; a sharded weight gets its shard.

    places: the indices of its weights, by their id.
    """
    for level, one in _optimizers(optimizer):
        weights = one._trainable_variables
        own = [places[id(weight)] for weight in weights]
        same = [state for state in states if state.level == level and not set(own).isdisjoint(state.places)]
        for name, variable in singles_of(one).items():
            if value := [state.singles[name] for state in same if name in state.singles]:
                variable.assign(value[0])
        for name, variables in lists_of(one).items():
            slots = {
                place: value
                for state in same
                if name in state.lists
                for place, value in zip(state.places, state.lists[name], strict=True)
            }
            for place, weight, variable in zip(own, weights, variables, strict=True):
                if variable is not None and slots.get(place) is not None:
                    variable.assign(own_of(weight, slots[place]))


def keep_only(optimizer: Any, own: Sequence[Any], trainable: Sequence[Any]) -> None:
    """Reduce an optimizer that was built for a whole model to the state of this rank's variables, in their order.

    own: the variables of this rank; trainable: those that will have gradients. Raises UsageError if the optimizer was
    not built for one of these.
    """
    order = {id(variable): place for place, variable in reversed(list(enumerate([*trainable, *own])))}
    for level, one in _optimizers(optimizer):
        weights = list(one._trainable_variables)
        known = {id(weight) for weight in weights}
        if level == 0 and (new := [path_of(variable) for variable in trainable if id(variable) not in known]):
            raise UsageError(
                f"pipeline: this {type(one).__name__} was built for other weights, without this rank's {new[0]!r}: "
                "compile with a new optimizer, or with the optimizer of the model that was split"
            )
        places = [place for place, weight in enumerate(weights) if id(weight) in order]
        places.sort(key=lambda place: order[id(weights[place])])
        if places == list(range(len(weights))):
            continue
        left_out = set(range(len(weights))).difference(places)
        for name, variables in lists_of(one).items():
            for variable in (variables[place] for place in left_out):
                if variable is not None:
                    one._tracker.untrack(variable)
            _set(one, name, [variables[place] for place in places])
        _set(one, "_trainable_variables", [weights[place] for place in places])
        keys = {one._var_key(weights[place]): number for number, place in enumerate(places)}
        _set(one, "_trainable_variables_indices", keys)


def _set(optimizer: Any, name: str, value: Any) -> None:
    """Set an attribute without Keras' tracking, which would take weights for variables of the optimizer."""
    delattr(optimizer, name)  # TensorFlow stops tracking the old value
    vars(optimizer)[name] = value


def _optimizers(optimizer: Any) -> Iterator[tuple[int, Any]]:
    """Yield an optimizer and those inside it, with their level, if they are built."""
    if optimizer is None or not optimizer.built:
        return
    yield 0, optimizer
    within = [*getattr(optimizer, "_inner_optimizers", ()), getattr(optimizer, "inner_optimizer", None)]
    for one in within:
        if isinstance(one, keras.optimizers.Optimizer) and one.built:
            yield 1, one


def rebuild_optimizer(optimizer: Any) -> Any:
    """Return a new optimizer with the same configuration, without state. Raises UsageError if that is impossible."""
    every = optimizer, *getattr(optimizer, "_inner_optimizers", ())
    try:
        config = keras.optimizers.serialize(optimizer)
        classes = {one.__class__.__name__: one.__class__ for one in every}
        return keras.optimizers.deserialize(config, custom_objects=classes)
    except Exception as error:
        raise UsageError(
            f"pipeline: {type(optimizer).__name__} cannot be rebuilt from its configuration, which saving the whole "
            f"model requires ({type(error).__name__}: {str(error)[:300]}): give it a get_config() with all "
            "arguments of its __init__"
        ) from error


def warn_of_saving(optimizer: Any, rank: int) -> None:
    """Warn on rank 0, which writes the whole model, if it will fail to: before a long training rather than after it."""
    if optimizer is None or rank:
        return
    try:
        rebuild_optimizer(optimizer)
    except UsageError as error:
        warnings.warn(f"{error}; until then, only save_weights() can write this model", stacklevel=3)
