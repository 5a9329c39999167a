"""Operations of PyTorch by name: the correspondence of dimensions between results and inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from commlib.tensor_parallel import equations
from commlib.tensor_parallel.equations import UNKNOWN_LENGTH, Equation, Shape

Found = dict[str, Any]
"""The fields of a step: its kind, and the values for this kind."""


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call of a PyTorch function: its arguments and its result."""

    name: str
    args: tuple[Any, ...]
    options: dict[str, Any]
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    lengths: Shape = ()
    """The lengths of the first input, as numbers that remember their origin, if requested."""

    def argument(self, at: int, name: str, default: Any = None) -> Any:
        """Return an argument by position or name."""
        return self.args[at] if len(self.args) > at else self.options.get(name, default)

    def rest(self, name: str) -> tuple[Any, ...]:
        """Return numbers passed as separate arguments, or as a sequence."""
        given = self.args[1:] or (self.options.get(name, ()),)
        return tuple(given[0]) if len(given) == 1 and isinstance(given[0], Sequence) else given

    @property
    def shape(self) -> Shape:
        """The shape of the first input."""
        return tuple(self.inputs[0].shape)


def describe_call(called: FunctionCall) -> Found:
    """Describe a call; kind "unknown" if nothing is known."""
    if called.name in _FILLED:
        given = called.args[1:2] if called.name.startswith("new") else called.args[:1]
        sizes = given if given and isinstance(given[0], Sequence) else (called.args,)
        return {"kind": "constant", "inputs": [], "requested": tuple(one for one in sizes[0] if isinstance(one, int))}
    if not called.inputs:
        return {"kind": "constant"}
    describe = _OPERATIONS.get(called.name)
    fields = describe(called) if describe is not None else None
    equation = None if fields is None else fields.get("equation")
    if fields is None or (equation is not None and len(equation.inputs) != len(fields.get("inputs", called.inputs))):
        return {"kind": "unknown"}  # it has unknown arguments, such as values that diff prepends
    return fields


def _equation(equation: Equation | None, **more: Any) -> Found | None:
    return None if equation is None else {"kind": "equation", "equation": equation, **more}


def _pointwise(called: FunctionCall) -> Found | None:
    if called.name in ("to", "type", "type_as"):  # only dtype and device come from the other tensor
        return _equation(equations.pointwise(called.shape), inputs=called.inputs[:1])
    shapes = [tuple(tensor.shape) for tensor in called.inputs]
    results = [tuple(tensor.shape) for tensor in called.outputs[:1]]  # of an expanded tensor
    equation = equations.pointwise(*shapes, *results)
    lengths = called.rest("size") if called.name in ("expand", "broadcast_to") else ()
    return _equation(Equation(equation.inputs[: len(shapes)], equation.output), requested=tuple(lengths))


def _dropout(called: FunctionCall) -> Found | None:
    draws = bool(called.argument(2, "training", True)) and called.argument(1, "p", 0.5) > 0
    return _equation(equations.pointwise(called.shape), draws=draws)


def _random_slopes(called: FunctionCall) -> Found | None:
    draws = bool(called.argument(3, "training", False))
    return _equation(equations.pointwise(called.shape), draws=draws)


def _along(called: FunctionCall, default: int | None = -1, place: int = 1) -> Found | None:
    given = called.argument(place, "dim", default)
    dims = range(len(called.shape)) if given is None else (given,) if isinstance(given, int) else given
    return _equation(equations.dimwise(called.shape, dims))


def _rolled(called: FunctionCall) -> Found | None:
    given = called.argument(2, "dims", ()) if called.name == "roll" else called.rest("dims")
    dims = (given,) if isinstance(given, int) else tuple(given)
    return _equation(equations.dimwise(called.shape, dims or range(len(called.shape))))


def _normalized(called: FunctionCall) -> Found | None:
    """layer_norm and rms_norm: (x, shape, weight, bias)."""
    rank, count = len(called.shape), len(called.argument(1, "normalized_shape"))
    equation = equations.pointwise(*(tuple(tensor.shape) for tensor in called.inputs))
    return _equation(Equation(equation.inputs, equation.output, frozenset(range(rank - count, rank))))


def _reduced(called: FunctionCall, place: int = 1, default: int | None = None) -> Found | None:
    if len(called.inputs) > 1:
        return _pointwise(called) if place == 1 else None
    given = called.argument(place, "dim", called.options.get("axis", default))
    whole = given is None or isinstance(given, bool)  # settings of a variance estimate
    dims = range(len(called.shape)) if whole else (given,) if isinstance(given, int) else given
    keeps_dims = any(len(tensor.shape) == len(called.shape) for tensor in called.outputs)
    return _equation(equations.reduction(called.shape, dims or range(len(called.shape)), keeps_dims=keeps_dims))


def _pooled(called: FunctionCall) -> Found | None:
    """Pooling of images, or of tensors with one or three dimensions after the channels: max_pool2d has two."""
    images = int(called.name.partition("pool")[2][0])
    return _equation(equations.dimwise(called.shape, range(-images, 0)))


def _padded(called: FunctionCall) -> Found | None:
    given = called.argument(1, "pad")
    if not isinstance(given, Sequence) or len(called.inputs) > 1:
        return None
    return _equation(equations.dimwise(called.shape, range(-(len(given) // 2), 0)))


def _resized(called: FunctionCall) -> Found | None:
    return _equation(equations.dimwise(called.shape, range(2, len(called.shape))))


def _over_channels(called: FunctionCall) -> Found | None:
    """Norms of each example over its channels, or some of them, and pixels."""
    if len(called.inputs) > 1:
        return None
    return _equation(equations.dimwise(called.shape, range(1, len(called.shape))))


def _loss(called: FunctionCall) -> Found | None:
    """A loss of predictions and targets: needs all classes, and sums over the other dimensions."""
    shape = called.shape
    classes = frozenset({1} if len(shape) > 1 else {0}) if called.name in ("cross_entropy", "nll_loss") else frozenset()
    every = tuple(range(len(shape)))
    target = tuple(dim for dim in every if dim not in classes) if classes else every
    if (
        any(tensor.dim() for tensor in called.outputs)
        or len(called.inputs) != 2
        or len(target) != called.inputs[1].dim()
    ):
        return None
    return _equation(Equation((every, target), (), classes))


def _viewed(called: FunctionCall, dims: Sequence[int]) -> Found | None:
    equation = equations.selection(len(called.shape), dims)
    places = ((),) * (len(called.inputs) - 1)  # numbers, which match no dimension of the result
    return _equation(Equation((*equation.inputs, *places), equation.output, equation.needs))


def _transpose(called: FunctionCall) -> Found | None:
    rank = len(called.shape)
    dims = list(range(rank))
    if called.name in ("t", "T", "mT", "H", "mH"):
        dims = dims[::-1] if called.name in ("t", "T") else [*dims[:-2], *dims[:-3:-1]]
    else:
        first, second = called.argument(1, "dim0") % rank, called.argument(2, "dim1") % rank
        dims[first], dims[second] = second, first
    return _viewed(called, dims)


def _permute(called: FunctionCall) -> Found | None:
    return _viewed(called, [dim % len(called.shape) for dim in called.rest("dims")])


def _unsqueeze(called: FunctionCall) -> Found | None:
    dims = list(range(len(called.shape)))
    dims.insert(called.argument(1, "dim") % (len(dims) + 1), -1)
    return _viewed(called, dims)


def _squeeze(called: FunctionCall) -> Found | None:
    given = called.argument(1, "dim")
    rank = len(called.shape)
    dims = range(rank) if given is None else [dim % rank for dim in ((given,) if isinstance(given, int) else given)]
    return _viewed(called, [dim for dim in range(rank) if dim not in dims or called.shape[dim] != 1])


def _selected(called: FunctionCall) -> Found | None:
    dims = list(range(len(called.shape)))
    dim = called.argument(1, "dim") % len(dims)
    fields = _viewed(called, [-1 if at == dim else at for at in dims if called.name != "select" or at != dim])
    start, length = called.argument(2, "start"), called.argument(3, "length")
    if fields is None or called.name != "narrow" or not (isinstance(start, int) and isinstance(length, int)):
        return fields
    return {**fields, "kind": "piece", "dim": dim, "requested": (start, start + length)}


def _picked(called: FunctionCall) -> Found | None:
    """x[...] with numbers, slices, None, an ellipsis, and one list or tensor of numbers."""
    index = called.args[1] if isinstance(called.args[1], tuple) else (called.args[1],)
    many = [part for part in index if _is_many(part)]
    if len(many) > 1 or not all(
        part is None or part is ... or isinstance(part, int | slice) for part in index if not _is_many(part)
    ):
        return None
    if many and any(isinstance(part, int) for part in index):
        return None  # counts as another list
    missing = len(called.shape) - sum(part is not None and part is not ... for part in index)
    if not any(part is ... for part in index):
        index = (*index, ...)
    dims, at, pieces = list[int](), 0, list[tuple[int, int, int]]()
    for part in index:
        if part is None:
            dims.append(-1)
        elif part is ...:
            dims += range(at, at + missing)
            at += missing
        else:
            if _is_many(part):
                dims += [-1] * (part.dim() if isinstance(part, Tensor) else 1)
            elif isinstance(part, slice):
                length = called.shape[at]
                dims.append(at if len(range(*part.indices(length))) == length and part.step in (None, 1) else -1)
            if ends := _ends(part):
                pieces.append((at, *ends))
            at += 1
    fields = _viewed(called, dims)
    own = [(dim, first, last) for dim, first, last in pieces if dim not in dims]
    if fields is None or len(own) != 1 or dims.count(-1) != 1 or len(dims) != len(called.shape):
        return fields
    return {**fields, "kind": "piece", "dim": own[0][0], "requested": own[0][1:]}


def _ends(part: Any) -> tuple[int, int] | None:
    """Return the (start, end) of neighbours that an index selects, in a slice's form; None for other indices."""
    if isinstance(part, list) and len(part) == 1:
        return part[0], UNKNOWN_LENGTH if part[0] == -1 else part[0] + 1
    if isinstance(part, slice) and part.step in (None, 1):
        first, last = 0 if part.start is None else part.start, UNKNOWN_LENGTH if part.stop is None else part.stop
        return (first, last) if isinstance(first, int) and isinstance(last, int) else None
    return None


def _is_many(part: Any) -> bool:
    if isinstance(part, Tensor):
        return part.dtype not in (torch.bool, torch.uint8)
    return isinstance(part, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in part)


def _repeated(called: FunctionCall) -> Found | None:
    """Repetition of adjacent elements, such as keys for all queries of a group."""
    dim = called.argument(2, "dim")
    if dim is None:
        return None
    every = range(len(called.shape))
    if len(called.inputs) > 1:
        return _viewed(called, [-1 if at == dim % len(every) else at for at in every])
    fields, times = _viewed(called, every), called.argument(1, "repeats")
    if fields is not None and called.lengths:
        fields["requested"] = tuple(called.lengths[at] * times if at == dim % len(every) else -1 for at in every)
    return fields


def _reshape(called: FunctionCall) -> Found | None:
    lengths: tuple[Any, ...] = ()
    if called.name in ("view", "reshape"):
        lengths = called.rest("shape") or called.rest("size")
    elif called.name == "unflatten":
        dim, sizes = called.argument(1, "dim") % len(called.shape), tuple(called.argument(2, "sizes"))
        lengths = (*called.shape[:dim], *sizes, *called.shape[dim + 1 :])
    if lengths and not all(isinstance(length, int) for length in lengths):
        return _pointwise(called)  # another dtype
    return {"kind": "reshape", "requested": tuple(lengths)}


def _split(called: FunctionCall) -> Found | None:
    given = called.argument(1, "split_size_or_sections", called.options.get("split_size"))
    if called.name in ("split", "split_with_sizes"):
        lengths = (given,) if isinstance(given, int) else tuple(given)
        return {"kind": "split", "dim": called.argument(2, "dim", 0), "requested": lengths}
    place = 1 if called.name in ("unbind", "__iter__") else 2
    return {"kind": "split", "dim": called.argument(place, "dim", 0)}


def _joined(called: FunctionCall) -> Found | None:
    return {"kind": "join", "dim": called.argument(1, "dim", 0)}


def _product(called: FunctionCall) -> Found | None:
    left, right = (tuple(tensor.shape) for tensor in called.inputs)
    return _equation(equations.product(left, right))


def _added_product(called: FunctionCall) -> Found | None:
    """baddbmm: (added, left, right)."""
    added, left, right = (tuple(tensor.shape) for tensor in called.inputs)
    equation = equations.product(left, right)
    first = len(equation.output) - len(added)
    labels = tuple(
        ~equation.output[first + at] if length == 1 else equation.output[first + at] for at, length in enumerate(added)
    )
    return _equation(Equation((labels, *equation.inputs), equation.output, equation.needs))


def _einsum(called: FunctionCall) -> Found | None:
    if not isinstance(called.args[0], str):
        return None
    return _equation(equations.einsum(called.args[0], [tuple(tensor.shape) for tensor in called.inputs]))


def _linear(called: FunctionCall) -> Found | None:
    return {"kind": "product", "size": tuple(called.inputs[1].shape[::-1])}


def _attention(called: FunctionCall) -> Found | None:
    shapes = [tuple(tensor.shape) for tensor in called.inputs]
    equation = equations.attention(*shapes[:3])
    masks: list[tuple[int, ...]] = []
    for shape in shapes[3:]:
        scores = (*equation.inputs[0][:-1], equation.inputs[1][-2])
        first = len(scores) - len(shape)
        masks.append(
            tuple(~scores[first + at] if length == 1 else scores[first + at] for at, length in enumerate(shape))
        )
    draws = called.argument(4, "dropout_p", 0.0) > 0
    return _equation(Equation((*equation.inputs, *masks), equation.output, equation.needs), draws=draws)


_FILLED = ("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty")
"""Functions that fill a tensor of a requested shape with one number."""

ASKING = (
    *_FILLED, "view", "reshape", "unflatten", "expand", "broadcast_to", "split", "split_with_sizes", "chunk",
    "tensor_split", "narrow", "select", "getitem", "setitem", "repeat", "repeat_interleave",
)  # fmt: skip
"""Functions that take numbers as lengths and positions; others compute with them."""

_POOLS = ("max", "avg", "lp", "adaptive_max", "adaptive_avg")

_POINTWISE = (
    "abs", "acos", "acosh", "add", "addcdiv", "addcmul", "and", "angle", "asin", "asinh", "atan", "atan2", "atanh",
    "bfloat16", "bitwise_and", "bitwise_left_shift", "bitwise_not", "bitwise_or", "bitwise_right_shift", "bitwise_xor",
    "bool", "broadcast_to", "byte", "ceil", "celu", "char", "clamp", "clamp_max", "clamp_min", "clip", "clone",
    "complex", "conj", "contiguous", "copy", "copysign", "cos", "cosh", "cpu", "cuda", "data", "deg2rad", "detach",
    "digamma", "div", "divide", "double", "elu", "empty_like", "entr", "eq", "erf", "erfc", "erfcx", "erfinv", "exp",
    "exp2", "expand", "expand_as", "expit", "expm1", "fill", "float", "float_power", "floor", "floor_divide",
    "floordiv", "fmax", "fmin", "fmod", "frac", "full_like", "gammaln", "ge", "gelu", "gt", "half", "hardshrink",
    "hardsigmoid", "hardswish", "hardtanh", "heaviside", "hypot", "i0", "i0e", "i1", "i1e", "iadd", "imag", "imul",
    "int", "invert", "isclose", "isfinite", "isinf", "isnan", "isneginf", "isposinf", "isub", "itruediv", "le",
    "leaky_relu", "lerp", "lgamma", "log", "log1p", "log2", "log_ndtr", "log_sigmoid", "logaddexp", "logaddexp2",
    "logical_and", "logical_not", "logical_or", "logical_xor", "logit", "logsigmoid", "long", "lt", "masked_fill",
    "maximum", "minimum", "mish", "mod", "mse_loss", "mul", "multiply", "nan_to_num", "ndtr", "ndtri", "ne", "neg",
    "negative", "nextafter", "ones_like", "or", "pin_memory", "polar", "positive", "pow", "rad2deg", "radd", "real",
    "reciprocal", "relu", "relu6", "remainder", "requires_grad", "resolve_conj", "resolve_neg", "rmul", "round", "rpow",
    "rsqrt", "rsub", "rtruediv", "selu", "sgn", "short", "sigmoid", "sign", "signbit", "silu", "sin", "sinc", "sinh",
    "softplus", "softshrink", "softsign", "sqrt", "square", "sub", "subtract", "tan", "tanh", "tanhshrink", "threshold",
    "to", "truediv", "trunc", "type", "type_as", "where", "xlog1py", "xlogy", "xor", "zero", "zeros_like",
)  # fmt: skip

NUMBERS = {
    "item": "item", "tolist": "tolist", "bool": "a condition", "float": "float()", "int": "int()", "index": "an index",
    "complex": "complex()", "numpy": "numpy", "array": "numpy", "is_nonzero": "is_nonzero", "equal": "equal",
    "allclose": "allclose", "contains": "in", "dlpack": "dlpack", "len": "len",
}  # fmt: skip
"""Functions that return elements or lengths instead of tensors, with their names in messages."""

_OPERATIONS: dict[str, Callable[[FunctionCall], Found | None]] = {
    **dict.fromkeys(_POINTWISE, _pointwise),
    **dict.fromkeys(("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"), _dropout),
    **dict.fromkeys(("dropout1d", "dropout2d", "dropout3d"), _dropout),
    "rrelu": _random_slopes,
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "sort", "argsort"), _along),
    "logcumsumexp": _along,
    "topk": lambda called: _along(called, -1, 2),
    "normalize": lambda called: _along(called, 1, 2),
    "tril": lambda called: _equation(equations.dimwise(called.shape, (-1, -2))),
    "triu": lambda called: _equation(equations.dimwise(called.shape, (-1, -2))),
    **dict.fromkeys(("roll", "flip"), _rolled),
    **dict.fromkeys(("layer_norm", "rms_norm"), _normalized),
    **dict.fromkeys(
        ("sum", "mean", "amax", "amin", "max", "min", "prod", "var", "std", "logsumexp", "all", "any", "argmax",
         "argmin", "nansum", "nanmean", "count_nonzero", "var_mean", "std_mean", "median", "nanmedian"),
        _reduced,
    ),
    **dict.fromkeys(("norm", "vector_norm", "quantile", "nanquantile"), lambda called: _reduced(called, 2)),
    "kthvalue": lambda called: _reduced(called, 2, -1),
    "mode": lambda called: _reduced(called, 1, -1),
    **dict.fromkeys(("cummax", "cummin"), _along),
    "diff": lambda called: _along(called, -1, 2),
    **dict.fromkeys((f"{kind}_pool{n}d" for kind in _POOLS for n in (1, 2, 3)), _pooled),
    **dict.fromkeys((f"max_pool{n}d_with_indices" for n in (1, 2, 3)), _pooled),
    "pad": _padded,
    **dict.fromkeys(("interpolate", "upsample"), _resized),
    **dict.fromkeys(("group_norm", "local_response_norm"), _over_channels),
    **dict.fromkeys(("cross_entropy", "nll_loss", "mse_loss", "l1_loss"), _loss),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims", "t", "T", "mT", "H", "mH"), _transpose),
    "permute": _permute,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    **dict.fromkeys(("select", "narrow", "index_select"), _selected),
    "getitem": _picked,
    "repeat_interleave": _repeated,
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as"), _reshape),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "tensor_split", "unbind", "iter"), _split),
    **dict.fromkeys(("cat", "concat", "concatenate", "stack"), _joined),
    **dict.fromkeys(("matmul", "bmm", "mm", "rmatmul"), _product),
    "baddbmm": _added_product,
    "einsum": _einsum,
    "linear": _linear,
    "scaled_dot_product_attention": _attention,
}  # fmt: skip
