"""Stage functions: the forward, the backward and the regularisers of a stage, compiled by TensorFlow.

Every value that a forward reads is an argument, and new states of layers are results. So a backward can recompute the
forward from the same values: with the same dropout masks and the same statistics. It does so where activations are not
kept, or where the backward is split: a tape computes the gradients of inputs and weights in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf

from commlib.errors import UsageError
from commlib_tensorflow._recomputation_check import RecomputationCheck, mark_recomputation
from commlib_tensorflow.pipelines._layer_checks import check_state
from commlib_tensorflow.pipelines._parts import StageLayer
from commlib_tensorflow.pipelines._recompute import LayerRecompute, RecomputedLayers
from commlib_tensorflow.pipelines._selective_recompute import current_products, without_products
from commlib_tensorflow.pipelines._written_variables import WrittenScope
from commlib_tensorflow.tensor._penalties import whole_penalties

Loss = Callable[[Any, list[Any], Any], Any]
"""Of targets, the model's outputs and sample weights: the mean over the rows."""

Named = dict[str, tf.Tensor]


class StageFunctions:
    """The functions of a stage, with the variables that are trainable at construction.

    wanted: the names of the inputs whose gradients other stages need. outputs: the names of the model's outputs, on the
    last stage. regularized: the variables whose regularisers count in this stage. shared: variables that other ranks
    hold too. again: backwards recompute their forward; layers_again: or only these layers. keeps_products: except the
    results of matrix products, which the forward returns. eager: compile nothing; then products are recomputed, too.
    versions: weights are updated while forwards run, so forwards may not write weights.
    """

    def __init__(
        self,
        stage: int,
        part: StageLayer,
        *,
        wanted: Sequence[str],
        outputs: Sequence[str],
        loss: Loss | None,
        regularized: Sequence[Any],
        shared: Sequence[Any],
        again: bool,
        layers_again: Sequence[LayerRecompute] = (),
        keeps_products: bool = False,
        eager: bool = False,
        versions: bool = False,
    ) -> None:
        self._stage, self._part, self._wanted, self._outputs = stage, part, wanted, outputs
        self._loss, self._shared, self._versions = loss, shared, versions
        self.again = RecomputationCheck(f"stage {stage}") if again else None
        """Compares forwards, if they are recomputed."""
        self._keeps_products = keeps_products and not eager
        self.trainable: list[Any] = list(part.trainable_variables)
        """The variables that get gradients."""
        self.state: list[Any] = [*part.non_trainable_variables, *part.recurrent_states]
        """The other variables, such as statistics and seeds."""
        self.variables: list[Any] = [*self.trainable, *self.state]
        """All variables that a forward may write."""
        self._layers = RecomputedLayers(layers_again, self.trainable, self.state) if layers_again else None
        self.regularized = list(regularized)
        """The variables whose regularisers count in this stage."""
        wrap = _run_eagerly if eager else _compile
        self.forward = wrap(self._forward)
        """Takes weights, state, inputs, targets and sample weights; see `_forward`."""
        self.backward = wrap(self._backward)
        """Takes the same, with the gradients of results and the weights of losses; see `_backward`."""
        self.regularize = wrap(self._regularize)
        """Takes the regularised weights; see `_regularize`."""

    def record(
        self, weights: Any, state: Any, given: Named, target: Any, sample_weight: Any, *, has_loss: bool
    ) -> tuple[tuple[Named, Any, Any, list[Any], list[tf.Tensor]], RecordedForward]:
        """Run `forward` in training; return its results, and its activations for a backward without recomputation."""
        wanted = [name for name in self._wanted if given[name].dtype.is_floating]
        sources = [*weights, *(given[name] for name in wanted)]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            results = self.forward(weights, state, given, target, sample_weight, training=True, has_loss=has_loss)
        return results, RecordedForward(tape, results[0], results[1:3], sources, wanted)

    def _forward(
        self, weights: Any, state: Any, given: Named, target: Any, sample_weight: Any, *, training: bool, has_loss: bool
    ) -> tuple[Named, Any, Any, list[Any], list[tf.Tensor]]:
        """Return results, loss, the losses that layers add, the new states, and the products if they are kept.

        A missing value is None.
        """
        results, extra, changed = self.call(weights, state, given, training=training)
        loss = self._loss_of(results, target, sample_weight) if self._outputs and has_loss else None
        products = current_products() if self._keeps_products and training else []
        return results, loss, extra, changed, products

    def _backward(
        self, weights: Any, state: Any, given: Named, gradients: Named, target: Any, sample_weight: Any, shares: Any,
        products: Sequence[tf.Tensor], *, has_loss: bool, wants_weights: bool, wants_inputs: bool,
    ) -> tuple[list[Any], Named]:  # fmt: skip
        """Return the gradients of the weights and of the inputs.

        shares: the weights of the loss and of the losses that layers add.
        """
        arguments = weights, state, given, gradients, target, sample_weight, shares
        differentiate = partial(
            self._differentiate, has_loss=has_loss, wants_weights=wants_weights, wants_inputs=wants_inputs
        )
        if not products:
            return differentiate(*arguments)
        return without_products(differentiate, products, *arguments)  # type: ignore[no-any-return]

    def _differentiate(
        self, weights: Any, state: Any, given: Named, gradients: Named, target: Any, sample_weight: Any, shares: Any,
        *, has_loss: bool, wants_weights: bool, wants_inputs: bool,
    ) -> tuple[list[Any], Named]:  # fmt: skip
        wanted = [name for name in self._wanted if given[name].dtype.is_floating] if wants_inputs else []
        sources = [*(weights if wants_weights else ()), *(given[name] for name in wanted)]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            with mark_recomputation():
                results, extra, _ = self.call(weights, state, given, training=True)
            loss = self._loss_of(results, target, sample_weight) if self._outputs and has_loss else None
        derivatives = _gradients(tape, results, gradients, [loss, extra], shares, sources)
        count = len(weights) if wants_weights else 0
        return derivatives[:count], dict(zip(wanted, derivatives[count:], strict=True))

    def _regularize(self, weights: Any, scale: Any) -> tuple[Any, list[Any]]:
        """Return the sum of the regularisers, and its gradients times `scale`."""
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(weights)
            pairs = zip(self.regularized, weights, strict=True)
            losses = [tf.reduce_sum(variable.regularizer(weight)) for variable, weight in pairs]
            losses = whole_penalties(self.regularized, losses)
            scaled = [loss * tf.cast(scale, loss.dtype) for loss in losses]
        return tf.add_n([tf.cast(loss, tf.float64) for loss in losses]), tape.gradient(scaled, weights)

    def call(self, weights: Any, state: Any, given: Named, *, training: bool) -> tuple[Named, Any, list[Any]]:
        """Return results, the losses that layers added (a vector, or None), and the new values of `variables`.

        The value is None for an unchanged variable.
        """
        pairs = list(zip(self.trainable, weights, strict=True)), list(zip(self.state, state, strict=True))
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        count = 0 if graph is None else len(graph.get_operations())
        with WrittenScope(*pairs) as scope:
            with self._layers.calls(scope) if self._layers is not None and training else nullcontext():
                results = self._part(given, training=training)
            losses = [tf.cast(tf.reduce_sum(loss), tf.float64) for loss in scope.losses]
        before, after = scope.before, scope.after
        fixed = self.trainable if self._versions else ()
        check_state(self._stage, before, after, self.variables, self._shared, fixed, again=self.again is not None)
        if self.again is not None and training:
            if graph is None:
                self.again.ran(results)
            else:
                self.again.traced(given, graph.get_operations()[count:])
        changed = [None if after[id(v)] is before[id(v)] else after[id(v)] for v in self.variables]
        return results, tf.stack(losses) if losses else None, changed

    def _loss_of(self, results: Named, target: Any, sample_weight: Any) -> Any:
        if self._loss is None:
            return None  # only layers add losses, or nothing does
        loss = self._loss(target, [results[name] for name in self._outputs], sample_weight)
        shape = getattr(loss, "shape", None)
        if shape is not None and shape.num_elements() == 0:
            return tf.reduce_sum(loss)  # Keras leaves the loss of no rows unreduced
        if shape is None or shape.num_elements() not in (1, None):
            kind = type(loss).__name__ if shape is None else f"a tensor of shape {tuple(shape)}"
            raise UsageError(f"pipeline: the loss is {kind}, expected a tensor with one element")
        return tf.reshape(loss, ())


@dataclass(frozen=True, slots=True)
class RecordedForward:
    """A forward on its own tape, with the activations."""

    tape: Any
    results: Named
    losses: Sequence[tf.Tensor | None]
    sources: list[tf.Tensor]
    wanted: list[str]

    def backward(self, gradients: Named, shares: Any) -> tuple[list[Any], Named]:
        """Return the gradients of weights and inputs, given the gradients of results and the weights of losses."""
        derivatives = _gradients(self.tape, self.results, gradients, self.losses, shares, self.sources)
        count = len(self.sources) - len(self.wanted)
        return derivatives[:count], dict(zip(self.wanted, derivatives[count:], strict=True))


def _gradients(
    tape: Any, results: Named, gradients: Named, losses: Sequence[tf.Tensor | None], shares: Sequence[tf.Tensor],
    sources: Sequence[tf.Tensor],
) -> list[tf.Tensor | None]:  # fmt: skip
    """Return gradients of results and of weighted losses in one pass, so that small terms are not rounded away."""
    pairs = [(loss, share) for loss, share in zip(losses, shares, strict=True) if loss is not None]
    roots = [*(results[name] for name in gradients), *(loss for loss, _ in pairs)]
    if not roots:
        return [None] * len(sources)
    starts = [*gradients.values(), *(tf.cast(share, loss.dtype) for loss, share in pairs)]
    derivatives = tape.gradient(roots, list(sources), output_gradients=starts)
    return [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in derivatives]


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let TensorFlow compile a function, once for each signature; without XLA, which does not support varying sizes."""
    compiled: Callable[..., Any] = tf.function(function, autograph=False, reduce_retracing=True, jit_compile=False)
    return compiled


def _run_eagerly(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
