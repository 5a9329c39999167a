"""LoRA of divided layers: of the two factors of what is added to a kernel, one is divided as the kernel is.

The first factor has all dimensions of the kernel but the last, the second one that. The other factor is whole on every
rank, and used with what is divided: the ranks' parts of its gradient are added up.
"""

from __future__ import annotations

from typing import Any

import keras

from commlib.sharding.axis import Axis
from commlib.sharding.sharding import Sharding
from commlib_tensorflow._shards import shard_of, whole_shape
from commlib_tensorflow.tensor._dividing import Shardings
from commlib_tensorflow.tensor._sharing import for_sharers
from commlib_tensorflow.tensor.moves import copy


def kernel_of(layer: Any) -> Any:
    """Return the variable that LoRA leaves alone, and adds to."""
    return layer._embeddings if isinstance(layer, keras.layers.Embedding) else layer._kernel


def factors(layer: Any) -> tuple[Any, Any]:
    """Return both factors of a layer that has LoRA."""
    kind = "embeddings" if isinstance(layer, keras.layers.Embedding) else "kernel"
    return getattr(layer, f"lora_{kind}_a"), getattr(layer, f"lora_{kind}_b")


def divided_factors(layer: Any, kernel: Sharding) -> Shardings:
    """Return the factor that is divided with the kernel, and how; nothing if the layer has no LoRA."""
    if not getattr(layer, "lora_enabled", False):
        return []
    first, last = factors(layer)
    factor, dim = (last, 1) if kernel.dim == len(kernel.shape) - 1 else (first, kernel.dim)
    return [(factor, Sharding(whole_shape(factor), dim, kernel.parts, kernel.units, shared=kernel.shared))]


def with_lora(layer: Any, axis: Axis) -> Any:
    """Return this rank's part of the kernel and of what LoRA adds to it, as Keras does."""
    first, last = (_for_ranks(one, layer, axis) for one in factors(layer))
    added = layer.lora_alpha / layer.lora_rank * keras.ops.matmul(first, last)
    kernel = for_sharers(layer.sharers, kernel_of(layer), layer.sharding.dim)
    return keras.ops.cast(keras.ops.add(kernel, added), layer.compute_dtype)


def _for_ranks(factor: Any, layer: Any, axis: Axis) -> Any:
    """Return a factor whose gradient is added up over the ranks that have the same of it."""
    shard = shard_of(factor)
    if shard is None:
        return copy(factor, axis)
    assert isinstance(shard.sharding, Sharding)
    return for_sharers(layer.sharers, factor, shard.sharding.dim)
