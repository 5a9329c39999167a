"""MoE: a layer whose tokens each go to a few of many experts, which are divided among ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import keras
import tensorflow as tf

from commlib.comparison.agreement import options_of
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.expert.experts import Experts
from commlib.expert.mixture import Mixture, stats_of
from commlib.expert.placement import Placement
from commlib.expert.ranks import ExpertRanks, Ranks, placed
from commlib.expert.routing import Routing
from commlib.expert.stats import Stats
from commlib.tensor_parallel.streams import fold
from commlib_tensorflow._again import Recomputation, recomputation
from commlib_tensorflow._graph import Spec, call_in_order, no_autograph, result_empty
from commlib_tensorflow._shards import mark, shard_of
from commlib_tensorflow.expert._after_step import call_after_step
from commlib_tensorflow.expert._functions import Sent, combined, dispatched, routed, sent
from commlib_tensorflow.expert._padding import kept, without
from commlib_tensorflow.expert._stacked import computed, seeded, stacked
from commlib_tensorflow.expert._whereabouts import Whereabouts
from commlib_tensorflow.expert.mlp import MLP
from commlib_tensorflow.tensor._exporting import watch_exports
from commlib_tensorflow.tensor._in_files import InFiles


class MoE(InFiles, keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """A mixture of experts: a router sends each token to a few of them, and adds up what they make of it.

    inputs: (..., width), other tokens on each rank; a rank may have none. Returns the same shape. experts: how many,
    and how tokens go to them. ranks: a mesh (its axis ep, or a part of dp), or the communicator of the ranks that share
    the experts. expert: makes one, a layer from (rows, width) to the same, instead of the built-in MLP.

    The values of weights depend on rank 0's seed, not on the number of ranks. Those of experts are parts of stacks
    [experts, ...]: `gather_weights`. Losses of the router are added as Keras' layers add them, in training. A mask says
    which tokens are padding: they go nowhere. Collective to make, to build and to call, forward and backward.
    """

    whole_by = "it has experts: save what gather_weights(model) returns on all ranks, or use save_experts(path, model)"

    def __init__(
        self,
        experts: Experts,
        ranks: Ranks,
        *,
        expert: Callable[[], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.options, self._make = experts, expert
        self.ranks = ExpertRanks.of(ranks, experts.count, empty=result_empty)
        # Before anything else meets: ranks that mean other experts would wait for each other, or mix what they send.
        given = {**options_of(experts), "expert": expert and "a layer of its own", "dtype": self.dtype_policy.name}
        self._agreement = self.ranks.agree("MoE", "", given)  # Keras' names count what a process has made before
        self.axis = self.ranks.axis if self.ranks.product is None else self.ranks.product
        name = self.name if kwargs.get("name") else self.ranks.first(self.name)
        self.mixture = Mixture(name, experts, self.ranks)
        self.supports_masking, self.supports_jit = True, False
        self._seed = self.ranks.first(random.randint(1, 10**9))
        own = fold(self._seed, self.ranks.data.rank) >> 33  # others on ranks with other tokens
        self._draws = keras.random.SeedGenerator(own) if experts.draws or experts.jitter else None
        self._first: tuple[bool, bool] | None = None
        """Of the last forward that may be computed again: whether it trained, and had a mask."""

    def build(self, input_shape: Any) -> None:
        """Make the weights."""
        options, width = self.options, input_shape[-1]
        if width is None:
            raise UsageError(f"{self.name}: the last dimension of {tuple(input_shape)} is not known")
        self.width = width
        watch_exports()
        with seeded(self._seed):
            self.router = self.add_weight(
                shape=(options.count, width),
                initializer=keras.initializers.GlorotUniform(seed=random.randint(1, 10**9)),
                name="router",
                autocast=False,
            )
            self.shared = self._mlp(options.shared) if options.shared else None
            if self.shared is not None:
                self.shared.build((None, width))
        make = self._make or (lambda: self._mlp(1))
        with tf.init_scope():  # values are read, and whoever calls it first may be traced
            self._expert, self.stacks = stacked(self, make, width, self._seed, self.mixture.placement, self.ranks)
        self.whereabouts = Whereabouts(self)
        self.expert_bias: Any = None
        if options.bias_rate:
            self.expert_bias = self.add_weight(
                shape=(options.count,), dtype="float32", initializer="zeros", trainable=False, name="expert_bias",
                autocast=False,
            )  # fmt: skip  # steps of 0.001 are lost in half precision
            call_after_step(self.router, self._balance)

    def _mlp(self, times: int) -> Any:
        options = self.options
        if options.hidden is None:
            raise UsageError("MoE: give Experts(hidden=...), the features within the built-in MLP, or expert=")
        return MLP(
            self.width,
            times * options.hidden,
            gated=options.gated,
            activation=options.activation,
            use_bias=options.bias,
            dtype=self.dtype_policy,
        )

    @no_autograph
    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        """Return the outputs."""
        options, mixture = self.options, self.mixture
        again, training, mask = self._as_before(bool(training), mask)
        has_sequences = len(inputs.shape) > 2
        if not self._agreement.is_settled("first used"):
            used = {"dtype": inputs.dtype.name, "training": training, "sequences": "rows" if has_sequences else "no"}
            used |= {"trainable": self.trainable}
            self._agreement.settle("first used", used)
        keep = kept(self.name, inputs, mask)
        tokens = tf.reshape(without(inputs, keep), (-1, self.width))
        more = {"sequence": tf.maximum(tf.shape(inputs)[-2], 1) if has_sequences else tf.constant(0)}
        if keep is not None:
            more["mask"] = tf.reshape(keep, (-1,))
        if self.expert_bias is not None:
            more["bias"] = tf.convert_to_tensor(self.expert_bias)
        if training and options.draws:
            more["seed"] = keras.random.randint((), 0, 1 << 30, dtype="int32", seed=self._draws)
        names = list(more)

        def route(logits: Array, *arrays: Array) -> Routing:
            given: dict[str, Any] = dict(zip(names, arrays, strict=True))
            for name in ("sequence", "seed"):
                if name in given:
                    given[name] = int(given[name])
            return mixture.route(logits, training=training, again=again, **given)

        logits, given = self.logits(tokens, training=training), list(more.values())
        if options.chunks > 1 and self.ranks.axis.size > 1:
            y, losses = self._in_parts(tokens, logits, route, given, training)
        else:
            came = sent(tokens, logits, mixture, route, given)
            y, losses = self._computed(came, tokens, training), came.losses
        if training and options.has_losses:
            loss = options.balance_weight * losses[0] + options.z_weight * losses[1]
            self.add_loss(tf.cast(loss, keras.config.floatx()))  # Keras adds it to losses of that dtype
        y = tf.reshape(y, tf.shape(inputs))
        if self.shared is not None:
            shared = tf.reshape(self.shared(tokens), tf.shape(inputs))
            y = y + without(shared, keep)
        return y

    def _as_before(self, training: bool, mask: Any) -> tuple[bool, bool, Any]:
        """Return whether this is computed again for a backward, whether it trains, and its mask.

        `tf.recompute_grad`, by which Keras rematerializes a layer around this one, tells the layers within nothing of
        that. Raises UsageError for what would be lost there.
        """
        found = recomputation()
        if found is Recomputation.FIRST:
            if training and self.options.has_losses:
                raise UsageError(
                    f"{self.name}: the router's loss has no gradient within tf.recompute_grad or keras.RematScope: "
                    "give Experts(balance='none', z_weight=0), or leave the layer around this one out of it"
                )
            if training and self._draws is not None:
                raise UsageError(
                    f"{self.name}: tf.recompute_grad and keras.RematScope draw other random numbers when they compute "
                    "again: give Experts no noise, jitter or random choice, or leave the layer around this one out"
                )
            self._first = training, mask is not None
        elif found is Recomputation.AGAIN and self._first is not None:
            training, had_mask = self._first
            if had_mask and mask is None:
                raise UsageError(
                    f"{self.name}: its mask is lost where tf.recompute_grad or keras.RematScope computes the layer "
                    "around it again: leave that out, or give the mask to it as an argument"
                )
        return found is Recomputation.AGAIN, training, mask

    def rematerialized_call(self, layer_call: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the call as it is: a mixture made in a `keras.RematScope` is not computed again."""
        return layer_call

    def _computed(self, came: Sent, tokens: Any, training: bool) -> Any:
        """Return for tokens what the experts of all ranks make of them."""
        tensor = self.ranks.tensor if self._make is None else None
        local = len(self.mixture.placement.of_rank(self.ranks.axis.rank))
        with self.mixture.telling() if tf.executing_eagerly() else nullcontext():
            out = computed(self._expert, self.stacks, came.rows, came.counts, local, tensor, training=training)
        return combined(out, self.mixture, came, tokens)

    def _in_parts(self, tokens: Any, logits: Any, route: Any, given: Any, training: bool) -> tuple[Any, Any]:
        """Return that of tokens in several parts, and the losses: one part travels while experts compute another."""
        count = self.options.chunks
        found = routed(logits, count, route, given)
        xs, gates = tf.split(tokens, found.tokens, num=count), tf.split(found.gates, found.assignments, num=count)
        results, came = [], [dispatched(xs[0], gates[0], self.mixture, 0, found.state)]
        for part in range(count):
            if part + 1 < count:
                came.append(dispatched(xs[part + 1], gates[part + 1], self.mixture, part + 1, found.state))
            results.append(self._computed(came[part], xs[part], training))
        return tf.concat(results, 0), found.losses

    def _balance(self) -> None:
        """Let scores for choosing move towards even load, after a step."""
        bias: Any = self.expert_bias
        spec = Spec(tf.float32, tuple(bias.shape))
        (moved,) = call_in_order(
            "experts", lambda array: [self.mixture.rebalanced(array)], [tf.convert_to_tensor(bias)], [spec]
        )
        bias.assign(moved)

    def one_expert(self, weights: Sequence[Any], rows: Any) -> Any:
        """Return what an expert with these weights makes of rows, in evaluation."""
        return self._expert.call(weights, rows, training=False)

    def put_owners(self, owners: tuple[int, ...]) -> None:
        """Let weights be of the experts of these ranks. Collective where they have been of others."""
        placement = Placement(owners, self.mixture.placement.ranks)
        if placement != self.mixture.placement:
            self.mark(placement)
            self.mixture.place(placement)

    def mark(self, placement: Placement) -> None:
        """Let weights know of which experts they are."""
        for variable in self.stacks:
            shard = shard_of(variable)
            assert shard is not None
            mark(variable, placed(shard, placement.owners))

    def stats(self) -> Stats:
        """Return how experts were used since the last time, by tokens of all ranks. Collective."""
        return self.mixture.stats()

    def logits(self, tokens: Any, *, training: bool) -> Any:
        """Return the router's scores, in float32 whatever else is computed in."""
        x = tf.cast(tokens, tf.float32)
        if training and self.options.jitter:
            jitter = self.options.jitter
            x = x * keras.random.uniform(tf.shape(x), 1 - jitter, 1 + jitter, dtype="float32", seed=self._draws)
        return tf.matmul(x, tf.cast(self.router, tf.float32), transpose_b=True)

    def get_config(self) -> dict[str, Any]:
        """Refuse: a file would have one rank's experts, and ranks are no part of a configuration."""
        raise UsageError(
            f"{self.name}: a mixture of experts among ranks has no configuration, so it is neither saved nor copied as "
            "it is: save what gather_weights(model) returns, or use save_experts; for a copy make another model, and "
            "give it gather_weights(model) by set_weights"
        )

    def _trackable_children(self, save_type: str = "checkpoint", **options: Any) -> Any:
        """Return what TensorFlow's checkpoints have of the layer: it finds no variables in lists by itself."""
        children = super()._trackable_children(save_type, **options)
        stacks = {stack.name: stack for stack in self.stacks} if self.built and save_type == "checkpoint" else {}
        return {**children, **stacks}

    def check_export(self) -> None:
        """Refuse, on one rank, too: tokens are routed by Python, which is not in what is exported."""
        raise UsageError(
            f"{self.name}: a mixture of experts among ranks cannot be exported, as it routes tokens by this program: "
            "save what gather_weights(model) returns, which all ranks call, or use save_experts(path, model)"
        )

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Return the shape of the output, that of the input."""
        return input_shape


def expert_stats(model: keras.Model) -> dict[str, Stats]:
    """Return how the experts of a model's layers were used since the last time, by name, by tokens of all ranks.

    Collective, one small message. `commlib.expert.stats.drawn` draws them as bars.
    """
    return stats_of(layer.mixture for layer in model._flatten_layers() if isinstance(layer, MoE))
