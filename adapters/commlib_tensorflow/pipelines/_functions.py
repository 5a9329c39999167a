"""Functions: what TensorFlow compiles of a stage: its forward, its backward and its regularisers.

Everything that a forward reads is an argument, and new states of layers are results. So it can be computed again from
what it had: with the same masks of dropout, the same statistics. A backward does so where activations are not kept, or
where it is split: a tape has the gradients of inputs and weights at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf

from commlib.errors import UsageError
from commlib_tensorflow._again import Again, computed_again
from commlib_tensorflow.pipelines._parts import Part
from commlib_tensorflow.pipelines._recompute import LayerRecompute, RecomputedLayers
from commlib_tensorflow.pipelines._selective import products_so_far, without_products
from commlib_tensorflow.pipelines._traced import check_state
from commlib_tensorflow.pipelines._written import WrittenScope
from commlib_tensorflow.tensor._penalties import whole_penalties

Loss = Callable[[Any, list[Any], Any], Any]
"""Of targets, the model's outputs and sample weights: the mean over the rows."""

Named = dict[str, tf.Tensor]


class StageFunctions:
    """What a stage computes, with the variables that are trainable when this is made.

    wanted: the names of the inputs whose gradients other stages need. outputs: the names of the model's outputs, on the
    last stage. regularized: the variables whose regularisers count in this stage. shared: variables that other ranks
    have, too. again: backwards compute their forward again; layers_again: or only these layers.
    keeps_products: but for its products, which a forward
    returns. eager: compile nothing; then products are computed again, too. versions: weights are updated while forwards
    run, so these may not write them.
    """

    def __init__(
        self,
        stage: int,
        part: Part,
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
        self.again = Again(f"stage {stage}") if again else None
        """Compares forwards, if they are computed again."""
        self._keeps_products = keeps_products and not eager
        self.trainable: list[Any] = list(part.trainable_variables)
        """The variables that get gradients."""
        self.state: list[Any] = [*part.non_trainable_variables, *part.recurrent_states]
        """The others, such as statistics and seeds."""
        self.variables: list[Any] = [*self.trainable, *self.state]
        """All that a forward may write."""
        self._layers = RecomputedLayers(layers_again, self.trainable, self.state) if layers_again else None
        self.regularized = list(regularized)
        """The variables whose regularisers count in this stage."""
        made = _as_it_is if eager else _compiled
        self.forward = made(self._forward)
        """Of weights, state, inputs, targets and sample weights; see `_forward`."""
        self.backward = made(self._backward)
        """Of the same, with the gradients of results and the shares of losses; see `_backward`."""
        self.regularize = made(self._regularize)
        """Of the regularised weights; see `_regularize`."""

    def record(
        self, weights: Any, state: Any, given: Named, target: Any, sample_weight: Any, *, has_loss: bool
    ) -> tuple[tuple[Named, Any, Any, list[Any], list[tf.Tensor]], Recorded]:
        """Return what `forward` does in training, and its activations, for a backward that computes nothing again."""
        wanted = [name for name in self._wanted if given[name].dtype.is_floating]
        sources = [*weights, *(given[name] for name in wanted)]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            made = self.forward(weights, state, given, target, sample_weight, training=True, has_loss=has_loss)
        return made, Recorded(tape, made[0], made[1:3], sources, wanted)

    def _forward(
        self, weights: Any, state: Any, given: Named, target: Any, sample_weight: Any, *, training: bool, has_loss: bool
    ) -> tuple[Named, Any, Any, list[Any], list[tf.Tensor]]:
        """Return the results, the loss, those that layers add, what they write, and the products, if these are kept.

        None where there is none.
        """
        results, extra, changed = self.call(weights, state, given, training=training)
        loss = self._loss_of(results, target, sample_weight) if self._outputs and has_loss else None
        products = products_so_far() if self._keeps_products and training else []
        return results, loss, extra, changed, products

    def _backward(
        self, weights: Any, state: Any, given: Named, gradients: Named, target: Any, sample_weight: Any, shares: Any,
        products: Sequence[tf.Tensor], *, has_loss: bool, wants_weights: bool, wants_inputs: bool,
    ) -> tuple[list[Any], Named]:  # fmt: skip
        """Return the gradients of the weights and of the inputs. shares: of the loss, and of what layers add."""
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
            with computed_again():
                results, extra, _ = self.call(weights, state, given, training=True)
            loss = self._loss_of(results, target, sample_weight) if self._outputs and has_loss else None
        found = _gradients(tape, results, gradients, [loss, extra], shares, sources)
        count = len(weights) if wants_weights else 0
        return found[:count], dict(zip(wanted, found[count:], strict=True))

    def _regularize(self, weights: Any, scale: Any) -> tuple[Any, list[Any]]:
        """Return the sum of the regularisers, and the gradients of `scale` times that."""
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(weights)
            pairs = zip(self.regularized, weights, strict=True)
            losses = [tf.reduce_sum(variable.regularizer(weight)) for variable, weight in pairs]
            losses = whole_penalties(self.regularized, losses)
            scaled = [loss * tf.cast(scale, loss.dtype) for loss in losses]
        return tf.add_n([tf.cast(loss, tf.float64) for loss in losses]), tape.gradient(scaled, weights)

    def call(self, weights: Any, state: Any, given: Named, *, training: bool) -> tuple[Named, Any, list[Any]]:
        """Return results, the losses that layers added (a vector, or None), and the new values of `variables`.

        None for what did not change.
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
            return None  # there are those that layers add, or none
        loss = self._loss(target, [results[name] for name in self._outputs], sample_weight)
        shape = getattr(loss, "shape", None)
        if shape is not None and shape.num_elements() == 0:
            return tf.reduce_sum(loss)  # Keras leaves that of no rows as it is
        if shape is None or shape.num_elements() not in (1, None):
            got = type(loss).__name__ if shape is None else f"a tensor of shape {tuple(shape)}"
            raise UsageError(f"pipeline: the loss is {got}, expected a tensor with one element")
        return tf.reshape(loss, ())


@dataclass(frozen=True, slots=True)
class Recorded:
    """A forward on a tape of its own, with the activations."""

    tape: Any
    results: Named
    losses: Sequence[tf.Tensor | None]
    sources: list[tf.Tensor]
    wanted: list[str]

    def backward(self, gradients: Named, shares: Any) -> tuple[list[Any], Named]:
        """Return the gradients of the weights and of the inputs, given those of results and the shares of losses."""
        found = _gradients(self.tape, self.results, gradients, self.losses, shares, self.sources)
        count = len(self.sources) - len(self.wanted)
        return found[:count], dict(zip(self.wanted, found[count:], strict=True))


def _gradients(
    tape: Any, results: Named, gradients: Named, losses: Sequence[tf.Tensor | None], shares: Sequence[tf.Tensor],
    sources: Sequence[tf.Tensor],
) -> list[tf.Tensor | None]:  # fmt: skip
    """Return gradients of results and of losses times their shares: what is too small for gradients alone is kept."""
    pairs = [(loss, share) for loss, share in zip(losses, shares, strict=True) if loss is not None]
    roots = [*(results[name] for name in gradients), *(loss for loss, _ in pairs)]
    if not roots:
        return [None] * len(sources)
    starts = [*gradients.values(), *(tf.cast(share, loss.dtype) for loss, share in pairs)]
    found = tape.gradient(roots, list(sources), output_gradients=starts)
    return [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in found]


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let TensorFlow compile a function, once for each signature; not XLA, which knows no sizes that change."""
    made: Callable[..., Any] = tf.function(function, autograph=False, reduce_retracing=True, jit_compile=False)
    return made


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
