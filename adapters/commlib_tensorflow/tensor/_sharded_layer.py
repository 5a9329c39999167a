"""Sharded layers: the common parts of all kinds, from the input to the output."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from commlib.comparison.agreement import LayerAgreement
from commlib.errors import UsageError
from commlib.sharding.axis import ParallelAxis
from commlib.sharding.shard_sharing import Sharers, sharers_of
from commlib.tensor_parallel import moves
from commlib.tensor_parallel.moves import REDUCE
from commlib.tensor_parallel.styles import Column, Row, Style, Vocabulary
from commlib_tensorflow.tensor._activity import check_activity, regularize_activity
from commlib_tensorflow.tensor._file_layers import FileLayer, refuse_configuration
from commlib_tensorflow.tensor._lora import add_lora, factors, kernel_of, sharded_factors
from commlib_tensorflow.tensor._sharding import Shardings, report_unsharded_shape, shard_variables
from commlib_tensorflow.tensor._shared_weights import sum_shared_gradient
from commlib_tensorflow.tensor._values import broadcast_rank_0_values
from commlib_tensorflow.tensor.moves import copy, redistribute

_ELEMENTWISE = frozenset((
    "linear", "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "swish", "mish", "softplus",
    "softsign", "sigmoid", "hard_sigmoid", "hard_silu", "hard_swish", "log_sigmoid", "tanh", "hard_tanh",
    "tanh_shrink", "hard_shrink", "soft_shrink", "exponential", "squareplus", "threshold", "sparse_plus",
))  # fmt: skip


class ShardedLayer(FileLayer):
    """Sharded layer of Keras: it guards methods that would create variables or scales from a shard."""

    name: str
    path: str
    lora_enabled: bool
    lora_rank: int
    lora_alpha: float
    style: Any
    plan_check: Any = None
    """Records its first use, while the plan is not checked yet."""
    agreement: LayerAgreement | None = None
    """Agreement of all ranks on this layer; None while it is not sharded."""
    sharers: Sharers = ()
    """The ranks that share parts of its kernel."""

    @classmethod
    def from_config(cls, config: Any) -> Any:
        """Raise UsageError: a layer constructed sharded needs an axis. One sharded by a plan becomes a plain layer."""
        raise refuse_configuration(cls.__name__)

    def shardings(self, what: str, style: Any) -> Shardings:
        """Return the sharding of its variables; `self` may be a plain layer. Raises UsageError if impossible."""
        raise NotImplementedError

    def become(self, what: str, axis: ParallelAxis, style: Any) -> None:
        """Shard a plain layer in place."""
        shardings = self.shardings(what, style)
        shard_variables(what, axis, shardings)
        sharding = shardings[0][1]
        self.supports_jit = False
        self.axis, self.style, self.sharding = axis, style, sharding
        self.sharers = sharers_of(axis, sharding)
        regularize_activity(self, axis, style, sharding.copies(axis.size))
        self.agreement = LayerAgreement(axis.comm, type(self).__name__)  # names differ between ranks

    def compare(self, when: str, **more: object) -> None:
        """Compare the layer with the other ranks' layers. Collective; MismatchError on all ranks if it differs."""
        if self.agreement is not None:
            codec = None if self.axis.codec is None else self.axis.codec.name
            dtypes = [variable.dtype for variable in self.variables]
            options = {"style": self.style, "sharding": self.sharding, "codec": codec, "dtypes": dtypes, **more}
            self.agreement.settle(when, options)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the layer; the first call compares the input on all ranks, except in Keras' shape inference."""
        x: Any = args[0] if args else next(iter(options.values()), None)
        if self.agreement is not None and hasattr(x, "shape") and not isinstance(x, keras.KerasTensor):
            if self.plan_check is not None:
                self.plan_check.used(self)
            looked_at = self.plan_check is not None and self.plan_check.is_checking  # one rank alone may fail
            if not (looked_at or self.agreement.is_settled("first used")):
                self.compare("first used", input=f"{x.dtype.name}, {len(x.shape)} dimensions")
        return super().__call__(*args, **options)  # type: ignore[misc]

    @property
    def kernel(self) -> Any:
        """This rank's shard of the kernel, including LoRA."""
        return add_lora(self, self.axis) if self.has_own_lora else super().kernel  # type: ignore[misc]

    @property
    def shared_kernel(self) -> Any:
        """The kernel for the layer's product: gradients of shared parts are summed over the ranks that share them."""
        return self.kernel if self.has_own_lora else sum_shared_gradient(self.sharers, self.kernel, self.sharding.dim)

    @property
    def embeddings(self) -> Any:
        """This rank's shard of an embedding's table, including LoRA."""
        return add_lora(self, self.axis) if self.has_own_lora else super().embeddings  # type: ignore[misc]

    @property
    def has_own_lora(self) -> bool:
        """Whether it has LoRA with a sharded factor."""
        return self.agreement is not None and self.lora_enabled

    def enable_lora(self, *args: Any, **options: Any) -> None:
        """Enable LoRA as Keras does; one factor is sharded like the kernel. Collective.

        Arguments are Keras', the same on all ranks; both factors start with rank 0's values. Raises MismatchError.
        """
        if self.agreement is None:  # its factors will be sharded with it
            return super().enable_lora(*args, **options)  # type: ignore[misc, no-any-return]
        with report_unsharded_shape(kernel_of(self)):
            super().enable_lora(*args, **options)  # type: ignore[misc]
        self.compare("given LoRA", rank=self.lora_rank, alpha=self.lora_alpha)
        broadcast_rank_0_values(f"{self.name}, LoRA", factors(self), self.axis.comm)
        return shard_variables(self.path, self.axis, sharded_factors(self, self.sharding))

    def _check_quantize_args(self, mode: Any, compute_dtype: Any) -> None:
        """Raise UsageError before Keras quantises: its scales would be for this rank's shard only."""
        if self.agreement is not None:
            raise UsageError(f"{self.name} is sharded over ranks: quantise gather_model(model) instead")
        super()._check_quantize_args(mode, compute_dtype)  # type: ignore[misc]


def gives_part(layer: Any) -> bool:
    """Return whether a sharded layer returns this rank's shard; not for layers within attention."""
    style = layer.style
    if isinstance(style, Row):
        return style.sequence is not None
    is_table = isinstance(layer, keras.layers.Embedding) and isinstance(style, Vocabulary)
    return not (style.gather or is_table) and getattr(layer, "enters", True)


def add_up(layer: Any, part: Any, bias: Any, sequence: int | None) -> Any:
    """Return the sum over the ranks, full or as this rank's shard of the sequence, plus the bias once."""
    axis = layer.axis
    if sequence is None:
        x = redistribute(part, axis, REDUCE, layer=layer)
    else:
        x = redistribute(part, axis, moves.reduce_scatter(sequence))
    if bias is None:
        return x
    # With a sharded sequence each rank has a part of the bias' gradient.
    return x + tf.cast(bias if sequence is None else copy(bias, axis), x.dtype)


def is_elementwise(activation: Any, length: int = 8) -> bool:
    """Return whether an activation works element by element. One that is not Keras' own is tried.

    length: the length of the dimension that would be sharded.
    """
    name = getattr(activation, "__name__", "")
    if activation is None or getattr(keras.activations, name, None) is activation:
        return activation is None or name in _ELEMENTWISE
    with tf.init_scope():
        x = tf.constant(np.random.default_rng(0).normal(size=(2, 3, length)), keras.config.floatx())
        half = max(1, length // 2)
        try:
            whole, *halves = (_run_with_gradient(activation, part) for part in (x, x[..., :half], x[..., half:]))
        except Exception:
            return False
    parts = np.concatenate(halves, -1)
    return parts.shape == whole.shape and np.allclose(parts, whole, rtol=1e-4, atol=1e-6, equal_nan=True)


def _run_with_gradient(activation: Any, x: Any) -> Any:
    """Return an activation's result stacked on its gradient, which may be a custom function."""

    def tried(x: Any) -> Any:
        result = activation(x)
        return result, tf.gradients(result, x, tf.cos(3 * x + 1), unconnected_gradients="zero")[0]

    plain = tf.autograph.experimental.do_not_convert(tried)
    function = tf.function(plain, autograph=False).get_concrete_function(tf.TensorSpec(x.shape, x.dtype))
    return np.stack([one.numpy() for one in function(x)])


def check_elementwise(what: str, activation: Any, style: Column, length: int) -> None:
    """Raise UsageError for an activation that needs all outputs, because a rank has only a shard of them.

    length: the number of outputs.
    """
    if not (style.gather or is_elementwise(activation, length)):
        raise UsageError(
            f"plan: {what}: its activation {getattr(activation, '__name__', activation)!r} needs all outputs: use "
            "Column(gather=True), or make it a separate layer after a Row"
        )


def check_plain(what: str, layer: Any, style: Style) -> None:
    """Raise UsageError for a layer that is not built, or was changed in a way that sharding does not support."""
    check_activity(what, layer, style)
    if not layer.built:
        raise UsageError(f"plan: {what} is not built: call the model once, or give it an Input")
    if getattr(layer, "quantization_mode", None):
        raise UsageError(f"plan: {what} is quantised, and its scales cannot be sharded: leave it out of the plan")


def check_inputs(layer: Any, x: Any, dim: int) -> None:
    """Raise UsageError unless the input is sharded like the kernel."""
    whole, expected = layer.sharding.shape[layer.sharding.dim], layer.sharding.length(layer.axis.rank, layer.axis.size)
    width = x.shape[dim]
    if width in (expected, None):
        return
    hint = "the full length: use Row(split=True), put a Column before it, or check how its shape is computed"
    raise UsageError(
        f"{layer.name} on rank {layer.axis.rank} of {layer.axis.comm.name}: its input has length {width} along "
        f"dimension {dim}, expected {expected} of {whole}: {hint if width == whole else 'give both the same units'}"
    )
