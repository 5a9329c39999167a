"""LoRA of sharded layers: one of the two factors added to a kernel is sharded like the kernel.

The first factor has all dimensions of the kernel except the last, the second one the last. The other factor is
replicated on every rank and multiplies sharded values: the ranks' parts of its gradient are added up.
"""

from __future__ import annotations

from typing import Any

import keras

from commlib.sharding.axis import ParallelAxis
from commlib.sharding.sharding import Sharding
from commlib_tensorflow._shards import shard_of, whole_shape
from commlib_tensorflow.tensor._sharding import Shardings
from commlib_tensorflow.tensor._shared_weights import sum_shared_gradient
from commlib_tensorflow.tensor.moves import copy


def kernel_of(layer: Any) -> Any:
    """Return the variable to which LoRA adds."""
    return layer._embeddings if isinstance(layer, keras.layers.Embedding) else layer._kernel


def factors(layer: Any) -> tuple[Any, Any]:
    """Return both factors of a layer with LoRA."""
    kind = "embeddings" if isinstance(layer, keras.layers.Embedding) else "kernel"
    return getattr(layer, f"lora_{kind}_a"), getattr(layer, f"lora_{kind}_b")


def sharded_factors(layer: Any, kernel: Sharding) -> Shardings:
    """Return the factor that is sharded with the kernel, and its sharding; nothing if the layer has no LoRA."""
    if not getattr(layer, "lora_enabled", False):
        return []
    first, last = factors(layer)
    factor, dim = (last, 1) if kernel.dim == len(kernel.shape) - 1 else (first, kernel.dim)
    return [(factor, Sharding(whole_shape(factor), dim, kernel.parts, kernel.units, shared=kernel.shared))]


def add_lora(layer: Any, axis: ParallelAxis) -> Any:
    """Return this rank's shard of the kernel plus LoRA, as Keras does."""
    first, last = (_shared_factor(one, layer, axis) for one in factors(layer))
    added = layer.lora_alpha / layer.lora_rank * keras.ops.matmul(first, last)
    kernel = sum_shared_gradient(layer.sharers, kernel_of(layer), layer.sharding.dim)
    return keras.ops.cast(keras.ops.add(kernel, added), layer.compute_dtype)


def _shared_factor(factor: Any, layer: Any, axis: ParallelAxis) -> Any:
    """Return a factor whose gradient is summed over the ranks that share it."""
    shard = shard_of(factor)
    if shard is None:
        return copy(factor, axis)
    assert isinstance(shard.sharding, Sharding)
    return sum_shared_gradient(layer.sharers, factor, shard.sharding.dim)
