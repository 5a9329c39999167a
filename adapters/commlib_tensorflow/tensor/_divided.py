"""Divided layers: what those of all kinds have in common, from the input to the output."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from commlib.comparison.agreement import Agreement
from commlib.errors import UsageError
from commlib.sharding.axis import Axis
from commlib.sharding.sharding import Sharding
from commlib.sharding.sharers import Sharers, sharers_of
from commlib.tensor_parallel import moves
from commlib.tensor_parallel.moves import REDUCE
from commlib.tensor_parallel.styles import Column, Row, Style, Vocabulary
from commlib_tensorflow.tensor._activity import check_activity, regularize_activity
from commlib_tensorflow.tensor._dividing import as_whole, divide
from commlib_tensorflow.tensor._in_files import InFiles, refuse_configuration
from commlib_tensorflow.tensor._lora import divided_factors, factors, kernel_of, with_lora
from commlib_tensorflow.tensor._sharing import for_sharers
from commlib_tensorflow.tensor._values import take_values_of_rank_0
from commlib_tensorflow.tensor.moves import copy, moved

_ELEMENTWISE = frozenset((
    "linear", "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "swish", "mish", "softplus",
    "softsign", "sigmoid", "hard_sigmoid", "hard_silu", "hard_swish", "log_sigmoid", "tanh", "hard_tanh",
    "tanh_shrink", "hard_shrink", "soft_shrink", "exponential", "squareplus", "threshold", "sparse_plus",
))  # fmt: skip


class OwnVariables(InFiles):
    """A divided layer of Keras: what would make other variables of its own does not know that they are parts."""

    name: str
    path: str
    lora_enabled: bool
    lora_rank: int
    lora_alpha: float
    style: Any
    plan_check: Any = None
    """What hears of its first use, where the plan is not checked yet."""
    agreement: Agreement | None = None
    """That of all ranks on this layer; None while it is whole."""
    sharers: Sharers = ()
    """The ranks that have the same of its kernel."""

    @classmethod
    def from_config(cls, config: Any) -> Any:
        """Raise UsageError: a layer that was made divided needs an axis. One that a plan divided gives a plain one."""
        raise refuse_configuration(cls.__name__)

    def keep(self, what: str, axis: Axis, style: Any, sharding: Sharding) -> None:
        """Keep how the layer is divided."""
        self.axis, self.style, self.sharding = axis, style, sharding
        self.sharers = sharers_of(axis, sharding)
        regularize_activity(self, axis, style, sharding.copies(axis.size))
        self.agreement = Agreement(axis.comm, type(self).__name__)  # Keras counts in names what a process has made

    def compare(self, when: str, **more: object) -> None:
        """Compare the layer with that of the other ranks. Collective; MismatchError on all ranks if it differs."""
        if self.agreement is not None:
            codec = None if self.axis.codec is None else self.axis.codec.name
            dtypes = [variable.dtype for variable in self.variables]
            options = {"style": self.style, "sharding": self.sharding, "codec": codec, "dtypes": dtypes, **more}
            self.agreement.settle(when, options)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the layer; the first time, compare how ranks do that, but not while Keras asks for shapes alone."""
        x: Any = args[0] if args else next(iter(options.values()), None)
        if self.agreement is not None and hasattr(x, "shape") and not isinstance(x, keras.KerasTensor):
            if self.plan_check is not None:
                self.plan_check.used(self)
            looked_at = self.plan_check is not None and self.plan_check.is_checking  # a rank may fail there alone
            if not (looked_at or self.agreement.is_settled("first used")):
                self.compare("first used", input=f"{x.dtype.name}, {len(x.shape)} dimensions")
        return super().__call__(*args, **options)  # type: ignore[misc]

    @property
    def kernel(self) -> Any:
        """This rank's part of the kernel, with what LoRA adds to it."""
        return with_lora(self, self.axis) if self.has_own_lora else super().kernel  # type: ignore[misc]

    @property
    def shared_kernel(self) -> Any:
        """The kernel for the layer's product: what ranks share of it takes its gradient from all of these."""
        return self.kernel if self.has_own_lora else for_sharers(self.sharers, self.kernel, self.sharding.dim)

    @property
    def embeddings(self) -> Any:
        """This rank's part of the table of an embedding, with what LoRA adds to it."""
        return with_lora(self, self.axis) if self.has_own_lora else super().embeddings  # type: ignore[misc]

    @property
    def has_own_lora(self) -> bool:
        """Whether it has LoRA, of which one factor is this rank's part."""
        return self.agreement is not None and self.lora_enabled

    def enable_lora(self, *args: Any, **options: Any) -> None:
        """Give the layer LoRA as Keras does; the factor that is divided is this rank's part. Collective.

        Arguments are Keras', the same on all ranks; both factors begin with rank 0's values. Raises MismatchError.
        """
        if self.agreement is None:  # its factors are divided with it
            return super().enable_lora(*args, **options)  # type: ignore[misc, no-any-return]
        with as_whole(kernel_of(self)):
            super().enable_lora(*args, **options)  # type: ignore[misc]
        self.compare("given LoRA", rank=self.lora_rank, alpha=self.lora_alpha)
        take_values_of_rank_0(f"{self.name}, LoRA", factors(self), self.axis.comm)
        return divide(self.path, self.axis, divided_factors(self, self.sharding))

    def _check_quantize_args(self, mode: Any, compute_dtype: Any) -> None:
        """Raise UsageError, before Keras quantises: its scales would be those of this rank's part."""
        if self.agreement is not None:
            raise UsageError(f"{self.name} is divided among ranks: quantise gather_model(model) instead")
        super()._check_quantize_args(mode, compute_dtype)  # type: ignore[misc]


def gives_part(layer: Any) -> bool:
    """Return whether what a divided layer returns is this rank's part; not for layers within attention."""
    style = layer.style
    if isinstance(style, Row):
        return style.sequence is not None
    is_table = isinstance(layer, keras.layers.Embedding) and isinstance(style, Vocabulary)
    return not (style.gather or is_table) and getattr(layer, "enters", True)


def added_up(layer: Any, part: Any, bias: Any, sequence: int | None) -> Any:
    """Return the sum over the ranks, whole or this rank's shard of it, and then the bias, once."""
    axis = layer.axis
    if sequence is None:
        x = moved(part, axis, REDUCE, layer=layer)
    else:
        x = moved(part, axis, moves.reduce_scatter(sequence))
    if bias is None:
        return x
    # Of a divided sequence each rank has a part of the bias' gradient.
    return x + tf.cast(bias if sequence is None else copy(bias, axis), x.dtype)


def is_elementwise(activation: Any, length: int = 8) -> bool:
    """Return whether an activation looks at one element at a time. One that is not Keras' own is tried.

    length: of a dimension of which it gets a part then.
    """
    name = getattr(activation, "__name__", "")
    if activation is None or getattr(keras.activations, name, None) is activation:
        return activation is None or name in _ELEMENTWISE
    with tf.init_scope():
        x = tf.constant(np.random.default_rng(0).normal(size=(2, 3, length)), keras.config.floatx())
        half = max(1, length // 2)
        try:
            whole, *halves = (_tried(activation, part) for part in (x, x[..., :half], x[..., half:]))
        except Exception:
            return False
    parts = np.concatenate(halves, -1)
    return parts.shape == whole.shape and np.allclose(parts, whole, rtol=1e-4, atol=1e-6, equal_nan=True)


def _tried(activation: Any, x: Any) -> Any:
    """Return what an activation gives, and its gradient, which may be a function of its own, one above the other."""

    def tried(x: Any) -> Any:
        result = activation(x)
        return result, tf.gradients(result, x, tf.cos(3 * x + 1), unconnected_gradients="zero")[0]

    plain = tf.autograph.experimental.do_not_convert(tried)
    found = tf.function(plain, autograph=False).get_concrete_function(tf.TensorSpec(x.shape, x.dtype))
    return np.stack([one.numpy() for one in found(x)])


def check_elementwise(what: str, activation: Any, style: Column, length: int) -> None:
    """Raise UsageError for an activation that looks at all outputs, of which a rank has a part.

    length: how many outputs there are.
    """
    if not (style.gather or is_elementwise(activation, length)):
        raise UsageError(
            f"plan: {what}: its activation {getattr(activation, '__name__', activation)!r} needs all outputs: give "
            "Column(gather=True), or make it a layer of its own behind a Row"
        )


def check_plain(what: str, layer: Any, style: Style) -> None:
    """Raise UsageError for a layer that is not built, or is changed in ways that do not go with being divided."""
    check_activity(what, layer, style)
    if not layer.built:
        raise UsageError(f"plan: {what} is not built: call the model once, or give it an Input")
    if getattr(layer, "quantization_mode", None):
        raise UsageError(
            f"plan: {what} is quantised, and its scales know nothing of being divided: leave it out of the plan"
        )


def check_inputs(layer: Any, x: Any, dim: int) -> None:
    """Raise UsageError unless the input is divided as the kernel is."""
    whole, expected = layer.sharding.shape[layer.sharding.dim], layer.sharding.length(layer.axis.rank, layer.axis.size)
    got = x.shape[dim]
    if got in (expected, None):
        return
    hint = "as long as the whole: give Row(split=True), let a Column come before it, or see what shape it is made of"
    raise UsageError(
        f"{layer.name} on rank {layer.axis.rank} of {layer.axis.comm.name}: its input has length {got} along dimension "
        f"{dim}, expected {expected} of {whole}: {hint if got == whole else 'give both the same units'}"
    )
