"""MoE: a layer that routes each token to a few of many experts, which are distributed over ranks."""

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
from commlib.expert.expert_ranks import ExpertRanks, MixtureRanks, place_shard
from commlib.expert.experts import Experts
from commlib.expert.mixture import Mixture, stats_of
from commlib.expert.placement import ExpertPlacement
from commlib.expert.routing import Routing
from commlib.expert.stats import ExpertStats
from commlib.tensor_parallel.streams import fold
from commlib_tensorflow._host_calls import Spec, call_in_order, no_autograph, result_empty
from commlib_tensorflow._recomputation_check import Recomputation, recomputation
from commlib_tensorflow._shards import mark, shard_of
from commlib_tensorflow.expert._expert_stack import run_experts, stack_experts, use_seed
from commlib_tensorflow.expert._functions import (
    DispatchedTokens,
    combine_tokens,
    dispatch_tokens,
    route_and_dispatch,
    route_tokens,
)
from commlib_tensorflow.expert._padding import padding_mask, zero_padding
from commlib_tensorflow.expert._placement_state import PlacementState
from commlib_tensorflow.expert._step_hooks import call_after_step
from commlib_tensorflow.expert.mlp import MLP
from commlib_tensorflow.tensor._export_checks import watch_exports
from commlib_tensorflow.tensor._file_layers import FileLayer
from commlib_tensorflow.tensor.names import check_model


class MoE(FileLayer, keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """A mixture of experts: a router sends each token to a few of them, and sums their outputs.

    Called with (..., width), different tokens on each rank; a rank may have none. Returns the same shape. The width is
    that of the first inputs, as Keras' layers infer it; `commlib_torch.MoE` takes it as its first argument.

    Initial weights depend on rank 0's seed, not on the number of ranks. Experts' weights are shards of stacks [experts,
    ...]: `gather_weights`. Router losses are added in training, as Keras' layers add them. A mask marks padding tokens,
    which are not routed. Construction, build and call are collective, forward and backward.

    Args:
        experts: Their number, and the routing options.
        ranks: The ranks that share the experts, such as `mesh["ep"]`, or a mesh of any number of axes, for its axis ep
            or a part of dp.
        expert: A function that makes one, a layer from (rows, width) to the same; None: the built-in MLP.
        **kwargs: Arguments of a Keras layer, such as `name`.
    """

    whole_by = "it has experts: save the result of gather_weights(model) on all ranks, or use save_experts(path, model)"

    def __init__(
        self,
        experts: Experts,
        ranks: MixtureRanks,
        *,
        expert: Callable[[], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.options, self._make = experts, expert
        self.ranks = ExpertRanks.of(ranks, experts.count, empty=result_empty)
        # First of all: ranks with other expert options would deadlock, or mix up their messages.
        given = {**options_of(experts), "expert": expert and "a custom layer", "dtype": self.dtype_policy.name}
        self._agreement = self.ranks.agree("MoE", "", given)  # names differ between ranks
        if expert is not None:
            experts.check_custom(self.name)
        self.axis = self.ranks.axis if self.ranks.product is None else self.ranks.product
        name = self.name if kwargs.get("name") else self.ranks.first(self.name)
        self.mixture = Mixture(name, experts, self.ranks)
        self.supports_masking, self.supports_jit = True, False
        self._seed = self.ranks.first(random.randint(1, 10**9))
        own = fold(self._seed, self.ranks.data.rank) >> 33  # different on ranks with other tokens
        self._draws = keras.random.SeedGenerator(own) if experts.draws or experts.jitter else None
        self._first: tuple[bool, bool] | None = None
        """The mode of the last forward that may be recomputed: whether it trained, and had a mask."""

    def build(self, input_shape: Any) -> None:
        """Create the weights."""
        options, width = self.options, input_shape[-1]
        if width is None:
            raise UsageError(f"{self.name}: the last dimension of {tuple(input_shape)} is unknown")
        self.width = width
        watch_exports()
        with use_seed(self._seed):
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
        with tf.init_scope():  # values are read, and the first call may be traced
            self._expert, self.stacks = stack_experts(self, make, width, self._seed, self.mixture.placement, self.ranks)
        self.whereabouts = PlacementState(self)
        self.expert_bias: Any = None
        if options.bias_rate:
            self.expert_bias = self.add_weight(
                shape=(options.count,), dtype="float32", initializer="zeros", trainable=False, name="expert_bias",
                autocast=False,
            )  # fmt: skip  # half precision would lose steps of 0.001
            call_after_step(self.router, self._balance)

    def _mlp(self, times: int) -> Any:
        options = self.options
        return MLP(
            self.width,
            options.mlp_features(times),
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
        keep = padding_mask(self.name, inputs, mask)
        tokens = tf.reshape(zero_padding(inputs, keep), (-1, self.width))
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
            arrived = route_and_dispatch(tokens, logits, mixture, route, given)
            y, losses = self._computed(arrived, tokens, training), arrived.losses
        if training and options.has_losses:
            loss = options.balance_weight * losses[0] + options.z_weight * losses[1]
            self.add_loss(tf.cast(loss, keras.config.floatx()))  # Keras adds it to losses of that dtype
        y = tf.reshape(y, tf.shape(inputs))
        if self.shared is not None:
            shared = tf.reshape(self.shared(tokens), tf.shape(inputs))
            y = y + zero_padding(shared, keep)
        return y

    def _as_before(self, training: bool, mask: Any) -> tuple[bool, bool, Any]:
        """Return whether this is a recomputation by a backward, whether it trains, and its mask.

        `tf.recompute_grad`, with which Keras rematerializes an outer layer, passes neither to inner layers. Raises
        UsageError for options that recomputation would break.
        """
        kind = recomputation()
        if kind is Recomputation.FIRST:
            if training and self.options.has_losses:
                raise UsageError(
                    f"{self.name}: the router's loss has no gradient within tf.recompute_grad or keras.RematScope: "
                    "use Experts(balance='none', z_weight=0), or exclude the layer around this one"
                )
            if training and self._draws is not None:
                raise UsageError(
                    f"{self.name}: tf.recompute_grad and keras.RematScope draw different random numbers when they "
                    "recompute: use Experts without noise, jitter or random choice, or exclude the outer layer"
                )
            self._first = training, mask is not None
        elif kind is Recomputation.AGAIN and self._first is not None:
            training, had_mask = self._first
            if had_mask and mask is None:
                raise UsageError(
                    f"{self.name}: its mask is lost when tf.recompute_grad or keras.RematScope recomputes the layer "
                    "around it: exclude that layer, or pass it the mask as an argument"
                )
        return kind is Recomputation.AGAIN, training, mask

    def rematerialized_call(self, layer_call: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the call unchanged: a mixture made in a `keras.RematScope` is not recomputed."""
        return layer_call

    def _computed(self, arrived: DispatchedTokens, tokens: Any, training: bool) -> Any:
        """Return the outputs of all ranks' experts for tokens."""
        tensor = self.ranks.tensor if self._make is None else None
        local = len(self.mixture.placement.of_rank(self.ranks.axis.rank))
        with self.mixture.reporting_errors() if tf.executing_eagerly() else nullcontext():
            out = run_experts(self._expert, self.stacks, arrived.rows, arrived.counts, local, tensor, training=training)
        return combine_tokens(out, self.mixture, arrived, tokens)

    def _in_parts(self, tokens: Any, logits: Any, route: Any, given: Any, training: bool) -> tuple[Any, Any]:
        """Return the outputs for tokens in several chunks, and the losses.

        One chunk travels while experts compute another.
        """
        count = self.options.chunks
        routed = route_tokens(logits, count, route, given)
        xs, gates = tf.split(tokens, routed.tokens, num=count), tf.split(routed.gates, routed.assignments, num=count)
        results, arrived = [], [dispatch_tokens(xs[0], gates[0], self.mixture, 0, routed.state)]
        for part in range(count):
            if part + 1 < count:
                arrived.append(dispatch_tokens(xs[part + 1], gates[part + 1], self.mixture, part + 1, routed.state))
            results.append(self._computed(arrived[part], xs[part], training))
        return tf.concat(results, 0), routed.losses

    def _balance(self) -> None:
        """Adjust the biases for choosing experts towards even load, after a step."""
        bias: Any = self.expert_bias
        spec = Spec(tf.float32, tuple(bias.shape))
        (moved,) = call_in_order(
            "experts", lambda array: [self.mixture.rebalanced(array)], [tf.convert_to_tensor(bias)], [spec]
        )
        bias.assign(moved)

    def one_expert(self, weights: Sequence[Any], rows: Any) -> Any:
        """Return the output of an expert with these weights for rows, in evaluation."""
        return self._expert.call(weights, rows, training=False)

    def put_owners(self, owners: tuple[int, ...]) -> None:
        """Set the placement of experts. Collective if it differs from the current one."""
        placement = ExpertPlacement(owners, self.mixture.placement.ranks)
        if placement != self.mixture.placement:
            self.mark(placement)
            self.mixture.place(placement)

    def mark(self, placement: ExpertPlacement) -> None:
        """Mark the weights with the placement of their experts."""
        for variable in self.stacks:
            shard = shard_of(variable)
            assert shard is not None
            mark(variable, place_shard(shard, placement.owners))

    def stats(self) -> ExpertStats:
        """Return the use of experts since the last call, counted over the tokens of all ranks. Collective."""
        return self.mixture.stats()

    def logits(self, tokens: Any, *, training: bool) -> Any:
        """Return the router's logits, always in float32."""
        x = tf.cast(tokens, tf.float32)
        if training and self.options.jitter:
            jitter = self.options.jitter
            x = x * keras.random.uniform(tf.shape(x), 1 - jitter, 1 + jitter, dtype="float32", seed=self._draws)
        return tf.matmul(x, tf.cast(self.router, tf.float32), transpose_b=True)

    def get_config(self) -> dict[str, Any]:
        """Refuse: a file would have one rank's experts, and a configuration cannot hold ranks."""
        raise UsageError(
            f"{self.name}: a mixture of experts over ranks has no configuration, so it cannot be saved or copied "
            "directly: save the result of gather_weights(model), or use save_experts; for a copy construct another "
            "model, and load gather_weights(model) into it by set_weights"
        )

    def _trackable_children(self, save_type: str = "checkpoint", **options: Any) -> Any:
        """Add the stacked weights to TensorFlow's checkpoints, which do not search lists."""
        children = super()._trackable_children(save_type, **options)
        stacks = {stack.name: stack for stack in self.stacks} if self.built and save_type == "checkpoint" else {}
        return {**children, **stacks}

    def check_export(self) -> None:
        """Refuse, even on one rank: Python code routes tokens, and an export does not contain it."""
        raise UsageError(
            f"{self.name}: a mixture of experts over ranks cannot be exported, because Python code routes its tokens: "
            "save the result of gather_weights(model), which all ranks call, or use save_experts(path, model)"
        )

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Return the shape of the output, which is the input's."""
        return input_shape


def expert_stats(model: keras.Model) -> dict[str, ExpertStats]:
    """Return the use of a model's experts since the last call, by layer name, over the tokens of all ranks.

    Collective, one small message. `commlib.expert.stats.draw_stats` draws them as bars.

    Args:
        model: A model with mixtures of experts.
    """
    if not isinstance(model, keras.layers.Layer):
        check_model(model, "expert_stats", ": models of Keras 2 have no experts, use Keras 3")
    return stats_of(layer.mixture for layer in model._flatten_layers() if isinstance(layer, MoE))
