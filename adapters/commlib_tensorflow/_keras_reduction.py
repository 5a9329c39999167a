"""Gradient reduction for a distributed optimizer of any Keras version.

`TensorReducer` does the reduction itself. This file decides which gradients are reduced, under which names, and with
which scale: gradients of variables that only this rank has are left out, and gradients that Keras averaged over passes
may become a sum again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from commlib import horovod as core
from commlib.arguments import read_flag
from commlib.compress.choice import CompressionChoice, check_no_momentum
from commlib.data_parallel.report import Reporting
from commlib.errors import UsageError
from commlib.horovod.computed_gradients import ComputedGradients
from commlib.horovod.wrapping import change_class
from commlib_tensorflow._eager_call import EagerCall
from commlib_tensorflow._gradient_tensors import scale_gradient
from commlib_tensorflow._local_gradients import add_local, places_of
from commlib_tensorflow._shards import shards_of
from commlib_tensorflow._variables import path_of
from commlib_tensorflow.clip import clip_by_global_norm
from commlib_tensorflow.gradients import TensorReducer
from commlib_tensorflow.named_verbs.operations import allreduce


class DistributedMixin(Reporting):
    """Mark optimizers that reduce their gradients. Not for direct use: see DistributedOptimizer."""

    _commlib: KerasGradients

    def register_local_var(self, variable: Any) -> None:
        """Keep the gradient of `variable` on this rank: it is only scaled. Call this before the first step."""
        self._commlib.register_local_var(variable)

    def compression_state(self) -> dict[str, Any]:
        """Return the state of compression from earlier steps on this rank."""
        return self._commlib.reducer.compression_state()

    def load_compression_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `compression_state` returned on this rank."""
        self._commlib.reducer.load_compression_state(state)

    @property
    def reducer(self) -> TensorReducer:
        """The object that reduces the gradients: its options, and one `reducers[i]` for each kind of call so far."""
        return self._commlib.reducer


class Wrapper(DistributedMixin):
    """Mark optimizers that were made distributed, and further instances of their class."""

    _commlib_first: KerasGradients
    """The reduction of the optimizer that was made distributed; further instances of its class reduce in the same way.
    """
    _commlib_prepare: Callable[[Any], None]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Make another distributed optimizer: `type(optimizer)(...)`, and so `optimizer.from_config(config)`.

        Raises UsageError if the reduction has settings for particular variables.
        """
        super().__init__(*arguments, **options)
        self._commlib_begin()

    def _commlib_begin(self) -> None:
        object.__setattr__(
            self, "_commlib", self._commlib_first.for_another()
        )  # bypasses Keras, which tracks attributes
        self._commlib_prepare(self)


class DistributedKeras(Wrapper):
    """Mark distributed optimizers of Keras, and give them `compute_gradients`."""

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> list[tuple[Any, Any]]:
        """Return pairs of gradients, reduced over all ranks, and variables: for `apply_gradients`. Collective.

        loss: a function without arguments, or a tensor that `tape` has recorded. var_list: variables, or a function
        that returns them. Raises UsageError for an optimizer that accumulates several passes.
        """
        if getattr(self, "gradient_accumulation_steps", None) or getattr(self, "_commlib_passes", None) is not None:
            raise UsageError(
                "compute_gradients() does not work with several passes per step, which are added up before they are "
                "reduced: take the gradients of a pass from a tf.GradientTape, and apply them"
            )
        return self._commlib.compute(gradients_of(loss, var_list, tape))


class KerasGradients:
    """Reduction of one optimizer's gradients. `undo_division` multiplies the reduced gradients."""

    def __init__(
        self,
        name: str,
        *,
        groups: int | Sequence[Sequence[Any]] | None,
        undo_division: int,
        scale_local_gradients: bool,
        local_layers: Sequence[Any],
        **settings: Any,
    ) -> None:
        self._settings = {
            "groups": groups,
            "undo_division": undo_division,
            "scale_local_gradients": scale_local_gradients,
            "local_layers": local_layers,
            **settings,
        }
        self.name = name
        self.expected: list[Any] = []
        """The variables whose gradients the optimizer is about to pass."""
        self.ran = False
        self.given_reduced = False
        """Whether the gradients are already reduced."""
        self.absent: dict[Any, Any] = {}
        """The variables, by `key_of`, without a gradient on this rank; and whether another has one, if known."""
        self._computed = ComputedGradients()
        self._undo_division = undo_division
        self._scale_local = read_flag("scale_local_gradients", scale_local_gradients)
        self._local: set[Any] = set()
        self._local_layers = list(local_layers)
        self._places: dict[Any, int] = {}
        self._named: tuple[list[Any], list[int], list[str]] = [], [], []
        """The variables that were named last, their ids and their names."""
        if groups is not None and not isinstance(groups, int):
            groups = [[self._name_of(variable) for variable in group] for group in groups]
        self.reducer = TensorReducer(name, groups=groups, reads_marks=True, **settings)

    def for_another(self) -> KerasGradients:
        """Return a reduction for another optimizer, with the same settings. Not collective.

        Raises UsageError if the settings name variables, because another optimizer has different ones.
        """
        for what, is_given in {
            "groups of variables": isinstance(self._settings["groups"], list),
            "variables or layers whose gradients stay on their rank": self._local or self._local_layers,
        }.items():
            if is_given:
                raise UsageError(
                    f"{self.name} has {what}, so it cannot be applied to another optimizer: make a plain optimizer of "
                    "keras.optimizers, and wrap it with the settings for its own variables"
                )
        return KerasGradients(self.name, **self._settings)

    @property
    def size(self) -> int:
        """The number of ranks that reduce together."""
        return self.reducer.size

    def register_local_var(self, variable: Any) -> None:
        """Keep the gradient of `variable` on this rank."""
        self._local.add(key_of(variable))

    def reduce(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        *,
        strict: Collection[int] | None = None,
        given_if: Mapping[int, Any] = MappingProxyType({}),
    ) -> list[Any]:
        """Return the reduced gradients of `variables`, as `TensorReducer` does. In a graph or eagerly.

        A gradient that is None only on this rank counts as zeros; but in a graph, and for the numbers in `strict`, it
        is a MismatchError.
        """
        self.ran = True
        shared = self.shared(variables)
        if len(shared) == len(variables):
            results = self.reducer(gradients, self._names_of(variables), variables, strict=strict, given_if=given_if)
        else:
            over_ranks = zip(shared, self._reduce_some(shared, gradients, variables, strict, given_if), strict=True)
            results = add_local(self.reducer, gradients, variables, dict(over_ranks), scale=self._scale_local)
        if self._undo_division == 1:
            return results
        return [scale_gradient(gradient, float(self._undo_division)) for gradient in results]

    def _reduce_some(
        self,
        numbers: Sequence[int],
        gradients: Sequence[Any],
        variables: Sequence[Any],
        strict: Collection[int] | None,
        given_if: Mapping[int, Any],
    ) -> list[Any]:
        """Return the reduced gradients of the variables with these numbers."""
        if not numbers:
            return []
        return self.reducer(
            [gradients[number] for number in numbers],
            [self._name_of(variables[number]) for number in numbers],
            [variables[number] for number in numbers],
            strict=None if strict is None else [place for place, number in enumerate(numbers) if number in strict],
            given_if={place: given_if[number] for place, number in enumerate(numbers) if number in given_if},
        )

    def shared(self, variables: Sequence[Any]) -> Sequence[int]:
        """Return the numbers of the variables that all ranks of the set have."""
        local = self.local_keys()
        if not local and not any(shards_of(variables)):
            return range(len(variables))
        copies = places_of(variables)
        return [n for n, variable in enumerate(variables) if n not in copies and key_of(variable) not in local]

    def compute(self, pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Return pairs of reduced gradients and variables, which are not reduced again when they are applied."""
        variables = [variable for _, variable in pairs]
        reduced = self.reduce([gradient for gradient, _ in pairs], variables)
        self.note(reduced)
        return list(zip(reduced, variables, strict=True))

    def note(self, reduced: Sequence[Any]) -> None:
        """Record reduced gradients, so that these tensors are not reduced again when they are applied."""
        self._computed.note(reduced)

    def by_parts(self, variables: Sequence[Any], order: Sequence[int]) -> EagerCall | None:
        """Start a reduction of gradients that are passed part by part, in this order; None if that is not possible.

        Gradients must be reduced all at once if they are not to be sent early, if some stay here, or if a user's
        compressor takes tensors.
        """
        reducer = self.reducer
        if reducer.options.overlap is False or reducer.compressor is not None or self.has_local or places_of(variables):
            return None
        reducer.settle_ranks([path_of(variable) for variable in variables], variables)
        return None if reducer.alone else reducer.by_parts(self._names_of(variables), variables, order)

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that reduce together."""
        return self.reducer.process_set.ranks or ()

    @property
    def has_local(self) -> bool:
        """Whether gradients of some variables stay on this rank."""
        return bool(self.local_keys())

    def are_reduced(self, gradients: Sequence[Any]) -> bool:
        """Return whether `compute` returned these gradients. Call it once for the gradients of a step."""
        if self._computed.pending is None:
            return False
        averaged = self.reducer.op == core.Average and self._undo_division == 1 and not self.local_keys()
        return self._computed.are(gradients, else_averaged=averaged and not self.reducer.options.scheme)

    def clip(self, gradients: Sequence[Any], variables: Sequence[Any], clip_norm: float) -> list[Any]:
        """Return reduced gradients, clipped by their norm, with the same bits on all ranks.

        Gradients of this rank's own variables are clipped by a separate norm: in a common norm, ranks would differ.
        """
        local = self.local_keys()
        results: list[Any] = [None] * len(gradients)
        for here in (False, True):
            places = [number for number, variable in enumerate(variables) if (key_of(variable) in local) == here]
            if not places:
                continue
            own = [variables[place] for place in places]
            clipped, _ = clip_by_global_norm([gradients[place] for place in places], clip_norm, own)
            for place, gradient in zip(places, clipped, strict=True):
                # Keras makes gradients of embedding rows dense here, so that moments are of sums of rows, not of
                # single rows.
                results[place] = tf.convert_to_tensor(gradient)
        return results

    def agree_finite(self, finite: Any) -> Any:
        """Return whether `finite` holds on all ranks. In a graph or eagerly."""
        if self.reducer.alone:
            return finite
        name, ranks = f"{self.name}.finite", self.reducer.process_set
        flag = tf.cast(finite, tf.int32)
        return tf.cast(allreduce(flag, op=core.Min, name=name, process_set=ranks, ignore_name_scope=True), tf.bool)

    def _names_of(self, variables: Sequence[Any]) -> list[str]:
        ids = list(map(id, variables))
        if ids != self._named[1]:
            self._named = list(variables), ids, [self._name_of(variable) for variable in variables]
        return self._named[2]

    def _name_of(self, variable: Any) -> str:
        # Numbers, in the order in which variables were seen: Keras' names differ between ranks as soon as one of them,
        # for example, loaded its model from a file.
        return f"variable {self._places.setdefault(key_of(variable), len(self._places))}"

    def local_keys(self) -> set[Any]:
        """Return the keys (`key_of`) of the variables whose gradients stay on this rank."""
        if not self._local_layers:
            return self._local
        return self._local | {key_of(v) for layer in self._local_layers for v in layer.trainable_weights}


def gradients_of(loss: Any, var_list: Any, tape: Any = None) -> list[tuple[Any, Any]]:
    """Return pairs of gradients and variables. `loss` is a function, or a tensor that `tape` has recorded."""
    if not callable(loss):
        if tape is None:
            raise UsageError("compute_gradients: a loss that is a tensor needs the tape on which it was computed")
    else:
        tape = tf.GradientTape() if tape is None else tape
        with tape:
            if not callable(var_list):
                for variable in tf.nest.flatten(var_list):
                    tape.watch(variable if hasattr(variable, "ref") else variable.value)
            loss = loss()
    variables = tf.nest.flatten(var_list() if callable(var_list) else var_list)
    return list(zip(tape.gradient(loss, variables), variables, strict=True))


def key_of(variable: Any) -> Any:
    """Return a hashable key for a variable of TensorFlow or of Keras 3."""
    return (variable if hasattr(variable, "ref") else variable.value).ref()


def become(optimizer: Any, mixin: type, reduction: KerasGradients, prepare: Callable[[Any], None]) -> None:
    """Make `optimizer` an instance of `mixin` and of its own class.

    Its `__class__` still reports the plain class, which Keras uses when it saves: so files can be read without commlib.
    `prepare` is called with it, and with each further instance of its class.
    """
    plain = type(optimizer)
    own = {"_commlib_first": reduction, "_commlib_prepare": staticmethod(prepare)}
    change_class(optimizer, mixin, __class__=property(lambda self: plain), **own)
    object.__setattr__(optimizer, "_commlib", reduction)  # bypasses Keras, which tracks attributes
    prepare(optimizer)


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace attribute `name` of a Keras class by the result of `make`, at most once for each `make`."""
    original = vars(owner)[name]
    getter = original.fget if isinstance(original, property) else original
    made_by = getattr(getter, "_commlib", ())
    if make not in made_by:
        replacement: Any = make(original)
        marked: Any = replacement.fget if isinstance(replacement, property) else replacement
        marked._commlib = (*made_by, make)
        setattr(owner, name, replacement)


def check_momentum(optimizer: Any, compression: Any) -> None:
    """Raise UsageError if both an optimizer and the compression of its gradients have momentum."""
    if isinstance(compression, CompressionChoice) and compression.scheme is None:
        return
    momentum = {name: getattr(optimizer, name, None) for name in ("momentum", "beta_1")}
    check_no_momentum(compression, type(optimizer).__name__, momentum)


def check_variables(gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Raise UsageError for variables that are overwritten by their gradient: Keras does so for float8."""
    for gradient, variable in zip(gradients, variables, strict=False):
        if gradient is not None and getattr(variable, "overwrite_with_gradient", False):
            raise UsageError(
                f"variable {path_of(variable)} is overwritten by its gradient (float8 training), which ranks cannot "
                "reduce: train without float8"
            )


if TYPE_CHECKING:

    class WrappedOptimizer(DistributedKeras, Any):  # type: ignore[misc]
        """What `DistributedOptimizer` returns: an optimizer of the user's class, with more methods.

        These methods are for type checkers. Any is the user's class: a variable of that class may hold the result.
        """
else:
    WrappedOptimizer = DistributedMixin
