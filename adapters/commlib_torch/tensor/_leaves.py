"""Leaves: layers of PyTorch that a trace records as units, without the operations inside."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd

from commlib.sharding.axis import ParallelAxis
from commlib.tensor_parallel import equations
from commlib.tensor_parallel.equations import Equation
from commlib.tensor_parallel.styles import Style

_POINTWISE = (
    nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Identity, nn.LeakyReLU,
    nn.LogSigmoid, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softshrink, nn.Softsign,
    nn.Tanh, nn.Tanhshrink, nn.Threshold,
)  # fmt: skip

INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)

_KNOWN = (
    nn.Linear, _ConvNd, nn.Embedding, nn.MultiheadAttention, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _BatchNorm,
    *INSTANCE_NORMS, _DropoutNd, nn.RReLU, nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.PReLU, *_POINTWISE,
)  # fmt: skip


def is_leaf(module: nn.Module) -> bool:
    """Return whether a module is recorded as a unit: known layers, and all sharded layers."""
    divided = isinstance(getattr(module, "style", None), Style) or isinstance(
        getattr(module, "axis", None), ParallelAxis
    )
    return divided or isinstance(module, _KNOWN) or is_transposed(module)


def has_own_forward(module: nn.Module) -> bool:
    """Return whether a layer has a user-defined forward, which may store values."""
    forwards = [vars(kind).get("forward") for one in module.modules() for kind in type(one).__mro__]
    return any(
        one is not None and one.__module__.partition(".")[0] not in ("torch", "commlib_torch", "transformers")
        for one in forwards
    )


def is_transposed(module: nn.Module) -> bool:
    """Return whether a module is Hugging Face's Conv1D, by its name, because the library is optional."""
    return any(one.__name__ == "Conv1D" and one.__module__.startswith("transformers.") for one in type(module).__mro__)


def describe_leaf(module: nn.Module, x: Tensor) -> dict[str, Any]:
    """Return the fields of a leaf's step for its first input: its kind, and the values for this kind."""
    shape = tuple(x.shape)
    every = tuple(range(len(shape)))
    if is_transposed(module):
        return {"kind": "product", "size": (module.nx, module.nf)}
    match module:
        case nn.Linear():
            return {"kind": "product", "size": (module.in_features, module.out_features)}
        case _ConvNd():
            dim = -1 - len(module.kernel_size)
            return {"kind": "product", "dims": (dim, dim), "size": (module.in_channels, module.out_channels)}
        case nn.Embedding():
            return {"kind": "table", "size": (module.num_embeddings, module.embedding_dim)}
        case nn.MultiheadAttention():
            return {"kind": "attention", "size": (module.num_heads, module.num_heads)}
        case nn.LayerNorm() | nn.RMSNorm():
            return _equation(equations.dimwise(shape, every[-len(module.normalized_shape) :]), module)
        case nn.GroupNorm():
            groups = {"size": (module.num_groups, module.num_channels)}
            return _of_features(equations.dimwise(shape, every[2:]), module) | groups
        case _BatchNorm():
            return _of_features(equations.dimwise(shape, (*every[:1], *every[2:])), module)
        case nn.InstanceNorm1d() | nn.InstanceNorm2d() | nn.InstanceNorm3d():
            return _of_features(equations.dimwise(shape, every[feature_dim(module, len(shape)) + 1 :]), module)
        case nn.Dropout1d() | nn.Dropout2d() | nn.Dropout3d() | nn.FeatureAlphaDropout() if module.p > 0:
            first = 1 if len(shape) == _UNBATCHED.get(type(module)) else 2  # given by a single number
            return _equation(equations.dimwise(shape, every[first:]), module) | {"draws": True}
        case _DropoutNd():
            return _equation(equations.pointwise(shape), module) | {"draws": module.p > 0}
        case nn.RReLU():
            return _equation(equations.pointwise(shape), module) | {"draws": module.lower < module.upper}
        case nn.Softmax() | nn.LogSoftmax() | nn.Softmin():
            return _equation(equations.dimwise(shape, every if module.dim is None else (module.dim,)), module)
        case nn.PReLU() if has_features(module):
            return _of_features(equations.pointwise(shape), module)
        case nn.PReLU():
            return _equation(equations.pointwise(shape), module)
    return _equation(equations.pointwise(shape), module) if isinstance(module, _POINTWISE) else {"kind": "unknown"}


_UNBATCHED = {nn.Dropout1d: 2, nn.Dropout3d: 4}
"""The number of dimensions of an input that is one example, for modules that accept it."""


def _equation(equation: Equation, module: nn.Module) -> dict[str, Any]:
    return {"kind": "equation", "equation": equation, "weights": any(True for _ in module.parameters())}


def _of_features(equation: Equation, module: nn.Module) -> dict[str, Any]:
    dim = feature_dim(module, len(equation.output))
    return {"kind": "equation", "equation": equation, "weights": has_features(module), "dims": (dim, dim)}


def has_features(module: nn.Module) -> bool:
    """Return whether a norm of channels, or PReLU, has values per feature, and must be sharded with the features.

    These are weights, moments, groups or, in instance norms, the number of features, which only a batch norm may lack.
    """
    if isinstance(module, nn.PReLU):
        return module.num_parameters > 1
    return not isinstance(module, _BatchNorm) or bool([*module.parameters(), *module.buffers()])


def feature_dim(module: nn.Module, rank: int) -> int:
    """Return the dimension of features of a norm of channels, or PReLU, in inputs of `rank` dimensions."""
    behind = next((at for at, kind in enumerate(INSTANCE_NORMS, 1) if isinstance(module, kind)), None)
    return 1 if behind is None else rank - 1 - behind
