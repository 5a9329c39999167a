"""Layers that can be sharded: find the class for a plain module and a style, and check it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from commlib.errors import UsageError
from commlib.tensor_parallel.plan import no_layer
from commlib.tensor_parallel.run.divisibility import Divisibility
from commlib.tensor_parallel.styles import Column, Replicate, Row, Sequence, Style, Vocabulary
from commlib_torch._trial_run import preserve_model
from commlib_torch.tensor._embedding_trial import goes_on_with_rows, subclass_beneath
from commlib_torch.tensor._leaves import has_features, is_transposed
from commlib_torch.tensor._sharding import check_division
from commlib_torch.tensor.attention import ColumnAttention
from commlib_torch.tensor.conv import ColumnConv1d, ColumnConv2d, ColumnConv3d, RowConv1d, RowConv2d, RowConv3d
from commlib_torch.tensor.embedding import ColumnEmbedding, VocabularyEmbedding
from commlib_torch.tensor.features import FEATURE_LAYERS, FeatureLayer, features_of
from commlib_torch.tensor.linear import ColumnLinear, RowLinear, VocabularyLinear
from commlib_torch.tensor.sequence import (
    ReplicatedLayer,
    RowWiseNorm,
    SequenceLayerNorm,
    SequenceRMSNorm,
    ShardwiseLayer,
    is_row_wise,
    subclass_around,
)
from commlib_torch.tensor.transposed_linear import ColumnTransposed, RowTransposed

_LAYERS: dict[tuple[type[nn.Module], type[Style]], type[nn.Module]] = {
    (nn.Linear, Column): ColumnLinear,
    (nn.Linear, Row): RowLinear,
    (nn.Linear, Vocabulary): VocabularyLinear,
    (nn.Embedding, Vocabulary): VocabularyEmbedding,
    (nn.Embedding, Column): ColumnEmbedding,
    (nn.Conv1d, Column): ColumnConv1d,
    (nn.Conv2d, Column): ColumnConv2d,
    (nn.Conv3d, Column): ColumnConv3d,
    (nn.Conv1d, Row): RowConv1d,
    (nn.Conv2d, Row): RowConv2d,
    (nn.Conv3d, Row): RowConv3d,
    (nn.MultiheadAttention, Column): ColumnAttention,
    (nn.LayerNorm, Sequence): SequenceLayerNorm,
    (nn.RMSNorm, Sequence): SequenceRMSNorm,
    **{(plain, Sequence): layer for plain, layer in FEATURE_LAYERS.items()},
}


def find_layer(name: str, module: nn.Module, style: Style) -> type[nn.Module]:
    """Return the class that a module becomes: its own if nothing changes. Raises UsageError if there is none."""
    plain = type(module)
    if isinstance(style, Replicate) and not style.into_sharded:
        return plain
    if hasattr(module, "become"):
        raise UsageError(f"plan: {name} is sharded already, as {module.style}")
    if "forward" in vars(module):
        raise UsageError(f"plan: {name} has a forward set on the object, over that of its class: shard the model first")
    if isinstance(style, Replicate):
        return subclass_around(ReplicatedLayer, plain)  # type: ignore[arg-type]  # types have a hash
    match = _LAYERS.get((plain, type(style)))
    if match is not None and (not issubclass(match, FeatureLayer) or has_features(module)):
        return match
    if is_transposed(module) and isinstance(style, Column | Row):
        return subclass_around(ColumnTransposed if isinstance(style, Column) else RowTransposed, plain)  # type: ignore[arg-type]
    if isinstance(module, nn.Linear) and (known := _LAYERS.get((nn.Linear, type(style)))) and is_plain_linear(module):
        return subclass_around(known, plain)  # type: ignore[arg-type]
    if isinstance(module, nn.Embedding) and isinstance(style, Vocabulary) and goes_on_with_rows(module):
        return subclass_beneath(plain, VocabularyEmbedding)  # type: ignore[arg-type]
    if isinstance(style, Sequence) and next(module.parameters(), None) is None:
        return subclass_around(ShardwiseLayer, plain)  # type: ignore[arg-type]
    if isinstance(style, Sequence) and is_row_wise(module):
        return subclass_around(RowWiseNorm, plain)  # type: ignore[arg-type]
    raise no_layer(name, plain, style, _LAYERS)


def check_layers(layers: Iterable[tuple[str, Any, Style, Any]], division: Divisibility) -> None:
    """Raise UsageError unless all (name, module, style, new class) can be sharded together."""
    for name, module, style, layer in layers:
        if division.is_new(name, module, style) and layer is not type(module):
            check_division(name, module, layer.shardings(module, name, style), division)
            if issubclass(layer, FeatureLayer):  # it may have no weights
                features_of(module).check(name, division.axis.size)


def is_plain_linear(module: nn.Linear) -> bool:
    """Return whether a layer has only a weight and a bias, and the results and gradients of `F.linear`.

    Some models write out the product, so a sharded layer may replace theirs: it is tried on random inputs.
    """
    extra = [
        name for name, _ in (*module.named_parameters(), *module.named_buffers()) if name not in ("weight", "bias")
    ]
    weight = module.weight
    if extra or any(True for _ in module.children()) or weight.is_meta or not weight.is_floating_point():
        return False
    if module._forward_hooks or module._forward_pre_hooks:
        return False
    with preserve_model(module), torch.enable_grad():
        try:
            x = torch.randn(2, 3, module.in_features, device=weight.device).to(weight.dtype).requires_grad_()
            y = F.linear(x, weight, module.bias)
            factors = torch.randn_like(y)
            own = module(x)
            wanted = [one for one in (x, weight, module.bias) if one is not None and one.requires_grad]
            gradients = [torch.autograd.grad((out * factors).sum(), wanted) for out in (own, y)]
        except RuntimeError:
            return False
    tolerance = 100 * torch.finfo(weight.dtype).eps
    return all(
        float((one - other).detach().abs().max()) <= tolerance * max(float(other.detach().abs().max()), tolerance)
        for one, other in [(own, y), *zip(*gradients, strict=True)]
    )
