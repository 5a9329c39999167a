"""Operations of TensorFlow's graphs: the mapping from dimensions of the inputs to dimensions of the results."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.tensor_util import try_evaluate_constant

from commlib.tensor_parallel import equations
from commlib.tensor_parallel.equations import UNKNOWN_LENGTH, Equation, Shape
from commlib.tensor_parallel.lengths import Length
from commlib_tensorflow._host_calls import NODES

CALLS = frozenset(("EagerPyFunc", "PyFunc", "PyFuncStateless"))
"""Host functions."""

Found = dict[str, Any]
"""The fields of a step: its kind, its inputs, and the matching details."""

_WRITTEN = "_gradient_op_type"
"""Attribute of operations with a custom gradient function."""

_WRITERS = frozenset(
    (code.co_filename, code.co_name) for code in (inspect.unwrap(function).__code__ for function in (tf.nn.silu,))
)
"""TensorFlow's own functions with a custom gradient, which is element by element."""

SOURCES = frozenset((
    "Const", "Shape", "ShapeN", "Size", "Rank", "Fill", "Range", "LinSpace", "Placeholder", "ReadVariableOp",
    "VarHandleOp", "StatelessRandomUniformV2", "StatelessRandomNormalV2", "StatelessRandomUniform", "RandomUniform",
))  # fmt: skip
"""Operations without model values as inputs, except shapes."""


def is_discrete(tensor: Any) -> bool:
    """Return whether a tensor has integers or booleans."""
    return not (tensor.dtype.is_floating or tensor.dtype.is_complex)


def shape_of(tensor: Any) -> Shape:
    """Return a tensor's shape; unknown lengths are equal to no other length."""
    if tensor.shape.rank is None:
        return ()
    return tuple(UNKNOWN_LENGTH if length is None else length for length in tensor.shape.as_list())


def describe_call(op: Any) -> Found:
    """Return what is known of an operation: kind "unknown" if nothing is."""
    inputs = list(op.inputs)
    if op.type in CALLS:  # a host function; it may be a move, like commlib's own
        return {"kind": "unseen", "inputs": [] if NODES in op.name.split("/") else inputs}
    known = all(tensor.shape.rank is not None for tensor in (*inputs, *op.outputs))
    describe = _OPERATIONS.get(op.type) if known and op.outputs else None
    fields = describe(op, inputs) if describe is not None else None
    return {"kind": "unknown", "inputs": inputs} if fields is None else fields


def has_own_gradient(op: Any) -> bool:
    """Return whether an operation, or one in a function that it calls, has a custom gradient.

    TensorFlow's own custom gradients are known and do not count, if they are in the graph itself.
    """
    if _WRITTEN in op.node_def.attr:
        return not any((one.filename, one.name) in _WRITERS for one in op.traceback)
    waiting = _called_functions(op.node_def)
    library = {one.signature.name: one for one in op.graph.as_graph_def().library.function} if waiting else {}
    seen = set(waiting)
    while waiting:
        function = library.get(waiting.pop())
        for node in () if function is None else function.node_def:
            if _WRITTEN in node.attr:
                return True
            waiting |= _called_functions(node) - seen
            seen |= waiting
    return False


def _called_functions(node: Any) -> set[str]:
    """Return the names of the functions that a node calls."""
    lists = [attr.list.func for attr in node.attr.values()]
    single = [attr.func.name for attr in node.attr.values() if attr.HasField("func")]
    return {*single, *(one.name for several in lists for one in several)}


def _equation(equation: Equation, inputs: Sequence[Any]) -> Found:
    return {"kind": "equation", "equation": equation, "inputs": list(inputs)}


def _number(tensor: Any) -> Any:
    """Return the value of a tensor computed from constants; None for any other tensor."""
    value = tf.get_static_value(tensor)
    return try_evaluate_constant(tensor) if value is None else value


def _numbers(tensor: Any) -> list[int] | None:
    value = _number(tensor)
    return None if value is None else [int(each) for each in np.atleast_1d(value)]


def _pointwise(op: Any, inputs: list[Any]) -> Found | None:
    shapes = [shape_of(tensor) for tensor in inputs]
    equation = equations.pointwise(*shapes, shape_of(op.outputs[0]))  # inputs are broadcast to the result's shape
    return _equation(Equation(equation.inputs[:-1], equation.output), inputs)


def _first(op: Any, inputs: list[Any]) -> Found | None:
    return _pointwise(op, inputs[:1])


def _bias(op: Any, inputs: list[Any]) -> Found | None:
    shape = shape_of(inputs[0])
    every = tuple(range(len(shape)))
    place = 1 if op.get_attr("data_format") == b"NCHW" else len(shape) - 1
    return _equation(Equation((every, (place,)), every), inputs)


def _softmax(op: Any, inputs: list[Any]) -> Found | None:
    return _equation(equations.dimwise(shape_of(inputs[0]), (-1,)), inputs)


def _along(op: Any, inputs: list[Any]) -> Found | None:
    dims = _numbers(inputs[-1])
    shape = shape_of(inputs[0])
    return _equation(equations.dimwise(shape, range(len(shape)) if dims is None else dims), inputs[:1])


def _band(op: Any, inputs: list[Any]) -> Found | None:
    return _equation(equations.dimwise(shape_of(inputs[0]), (-1, -2)), inputs[:1])


def _top(op: Any, inputs: list[Any]) -> Found | None:
    return _equation(equations.dimwise(shape_of(inputs[0]), (-1,)), inputs[:1])


def _reduced(op: Any, inputs: list[Any]) -> Found | None:
    dims = _numbers(inputs[1])
    shape = shape_of(inputs[0])
    if dims is None:
        return None
    keeps_dims = len(shape_of(op.outputs[0])) == len(shape)
    return _equation(equations.reduction(shape, dims, keeps_dims=keeps_dims), inputs[:1])


def _viewed(inputs: list[Any], dims: Sequence[int]) -> Found:
    return _equation(equations.selection(len(shape_of(inputs[0])), dims), inputs[:1])


def _transpose(op: Any, inputs: list[Any]) -> Found | None:
    dims = _numbers(inputs[1])
    return None if dims is None else _viewed(inputs, dims)


def _expanded(op: Any, inputs: list[Any]) -> Found | None:
    given = _numbers(inputs[1])
    if given is None:
        return None
    dims = list(range(len(shape_of(inputs[0]))))
    dims.insert(given[0] % (len(dims) + 1), -1)
    return _viewed(inputs, dims)


def _squeezed(op: Any, inputs: list[Any]) -> Found | None:
    shape = shape_of(inputs[0])
    dims = [dim % len(shape) for dim in op.get_attr("squeeze_dims")] or range(len(shape))
    return _viewed(inputs, [dim for dim in range(len(shape)) if dim not in dims or shape[dim] != 1])


def _strided(op: Any, inputs: list[Any]) -> Found | None:
    begin, end, step = (_numbers(tensor) for tensor in inputs[1:4])
    if begin is None or end is None or step is None:
        return None
    masks = {name: op.get_attr(f"{name}_mask") for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    shape, dims, at = shape_of(inputs[0]), list[int](), 0
    pieces: list[tuple[int, int, int]] = []
    consumed = sum(not (masks["new_axis"] | masks["ellipsis"]) >> bit & 1 for bit in range(len(begin)))
    for bit in range(len(begin)):
        if masks["ellipsis"] >> bit & 1:
            dims += range(at, at + len(shape) - consumed)
            at += len(shape) - consumed
        elif masks["new_axis"] >> bit & 1:
            dims.append(-1)
        else:
            if not masks["shrink_axis"] >> bit & 1:
                first = None if masks["begin"] >> bit & 1 else begin[bit]
                last = None if masks["end"] >> bit & 1 else end[bit]
                part = slice(first, last, step[bit])
                whole = step[bit] == 1 and len(range(*part.indices(shape[at]))) == shape[at]
                dims.append(at if whole else -1)
                if step[bit] == 1 and not whole:
                    pieces.append((at, first or 0, UNKNOWN_LENGTH if last is None else last))
            at += 1
    dims += range(at, len(shape))
    fields = _viewed(inputs, dims)
    if len(pieces) != 1 or dims.count(-1) != 1 or len(dims) != len(shape):
        return fields
    return {**fields, "kind": "piece", "dim": pieces[0][0], "requested": pieces[0][1:]}


def _sliced(op: Any, inputs: list[Any]) -> Found | None:
    before, after = shape_of(inputs[0]), shape_of(op.outputs[0])
    return _viewed(
        inputs, [dim if old == new else -1 for dim, (old, new) in enumerate(zip(before, after, strict=True))]
    )


def _tiled(op: Any, inputs: list[Any]) -> Found | None:
    counts = _numbers(inputs[1])
    return None if counts is None else _viewed(inputs, [dim if n == 1 else -1 for dim, n in enumerate(counts)])


def describe_identity(tensor: Any) -> Found | None:
    """Return what is known of a tensor that is passed on unchanged; None if its rank is unknown."""
    return None if tensor.shape.rank is None else _equation(equations.pointwise(shape_of(tensor)), [tensor])


def describe_repeat(x: Any, repeats: Any, axis: Any = None, name: str | None = None) -> Found | None:
    """Return what is known of `tf.repeat`: repeated elements stay in their shard."""
    if not isinstance(repeats, int) or axis is None:
        return None
    shape = shape_of(x)
    fields = _equation(equations.pointwise(shape), [x])
    if isinstance(repeats, Length):
        fields["times"] = tuple(repeats if dim == axis % len(shape) else 1 for dim in range(len(shape)))
    return fields


def _gathered(op: Any, inputs: list[Any]) -> Found | None:
    axis = _numbers(inputs[2])
    if axis is None:
        return None
    rank, inner = len(shape_of(inputs[0])), len(shape_of(inputs[1]))
    dim = axis[0] % rank
    if op.get_attr("batch_dims"):
        return None
    return _viewed(inputs, [*range(dim), *(-1,) * inner, *range(dim + 1, rank)])


def _reshape(op: Any, inputs: list[Any]) -> Found | None:
    lengths = _numbers(inputs[1])
    if UNKNOWN_LENGTH in shape_of(inputs[0])[1:] or UNKNOWN_LENGTH in shape_of(op.outputs[0])[1:]:
        return None
    return {"kind": "reshape", "inputs": inputs[:1], "requested": tuple(lengths or ())}


def _split(op: Any, inputs: list[Any]) -> Found | None:
    if op.type == "Unpack":
        return {"kind": "split", "inputs": inputs, "dim": op.get_attr("axis")}
    dim = _numbers(inputs[0] if op.type == "Split" else inputs[2])
    lengths = _numbers(inputs[1]) if op.type == "SplitV" else None
    if dim is None:
        return None
    return {"kind": "split", "inputs": [inputs[op.type == "Split"]], "dim": dim[0], "requested": tuple(lengths or ())}


def _joined(op: Any, inputs: list[Any]) -> Found | None:
    if op.type == "Pack":
        return {"kind": "join", "inputs": inputs, "dim": op.get_attr("axis")}
    dim = _numbers(inputs[-1])
    return None if dim is None else {"kind": "join", "inputs": inputs[:-1], "dim": dim[0]}


def _product(op: Any, inputs: list[Any]) -> Found | None:
    turns = ("transpose_a", "transpose_b") if op.type == "MatMul" else ("adj_x", "adj_y")
    shapes = [shape_of(tensor) for tensor in inputs]
    turned = [op.get_attr(name) for name in turns]
    plain = [(*s[:-2], s[-1], s[-2]) if turn else s for s, turn in zip(shapes, turned, strict=True)]
    equation = equations.product(*plain)
    back = [(*n[:-2], n[-1], n[-2]) if turn else n for n, turn in zip(equation.inputs, turned, strict=True)]
    return _equation(Equation(tuple(back), equation.output), inputs)


def _einsum(op: Any, inputs: list[Any]) -> Found | None:
    text = op.get_attr("equation").decode()
    return _equation(equations.einsum(text, [shape_of(tensor) for tensor in inputs]), inputs)


_POINTWISE = (
    "Abs", "Acos", "Acosh", "Add", "AddN", "AddV2", "Angle", "ApproximateEqual", "Asin", "Asinh", "Atan", "Atan2",
    "Atanh", "BesselI0e", "BesselI1e", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Cast", "Ceil", "CheckNumerics",
    "ClipByValue", "Complex", "ComplexAbs", "Conj", "Cos", "Cosh", "Digamma", "Div", "DivNoNan", "Elu", "Equal", "Erf",
    "Erfc", "Erfinv", "Exp", "Expm1", "FakeQuantWithMinMaxArgs", "Floor", "FloorDiv", "FloorMod", "Greater",
    "GreaterEqual", "Identity", "Igamma", "Igammac", "Imag", "Inv", "Invert", "IsFinite", "IsInf", "IsNan", "LeakyRelu",
    "LeftShift", "Less", "LessEqual", "Lgamma", "Log", "Log1p", "LogicalAnd", "LogicalNot", "LogicalOr", "Maximum",
    "Minimum", "Mod", "Mul", "MulNoNan", "Ndtri", "Neg", "NextAfter", "NotEqual", "OnesLike", "Polygamma", "Pow",
    "PreventGradient", "Real", "RealDiv", "Reciprocal", "Relu", "Relu6", "RightShift", "Rint", "Round", "Rsqrt",
    "Select", "SelectV2", "Selu", "Sigmoid", "Sign", "Sin", "Sinh", "Snapshot", "Softplus", "Softsign", "Sqrt",
    "Square", "SquaredDifference", "StopGradient", "Sub", "Tan", "Tanh", "TruncateDiv", "Xdivy", "Xlog1py", "Xlogy",
    "ZerosLike", "Zeta",
)  # fmt: skip

_OPERATIONS: dict[str, Callable[[Any, list[Any]], Found | None]] = {
    **dict.fromkeys(_POINTWISE, _pointwise),
    "BroadcastTo": _first,
    "BiasAdd": _bias,
    **dict.fromkeys(("Softmax", "LogSoftmax"), _softmax),
    **dict.fromkeys(("Cumsum", "Cumprod", "ReverseV2", "Roll"), _along),
    "MatrixBandPart": _band,
    **dict.fromkeys(("TopKV2", "InTopKV2"), _top),
    **dict.fromkeys(("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "ArgMax", "ArgMin"), _reduced),
    "Transpose": _transpose,
    "ExpandDims": _expanded,
    "Squeeze": _squeezed,
    "StridedSlice": _strided,
    "Slice": _sliced,
    "GatherV2": _gathered,
    "Tile": _tiled,
    "Reshape": _reshape,
    **dict.fromkeys(("Split", "SplitV", "Unpack"), _split),
    **dict.fromkeys(("ConcatV2", "Pack"), _joined),
    **dict.fromkeys(("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), _product),
    "Einsum": _einsum,
}
