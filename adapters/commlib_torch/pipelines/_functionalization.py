"""Functionalization: replace in-place operations by their results, and list the nodes that must be in one stage."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from typing import Any

from torch import fx, nn

from commlib_torch._tracer import is_operator_in_place

_VIEWS = frozenset((
    "view", "reshape", "transpose", "t", "permute", "squeeze", "unsqueeze", "flatten", "unflatten", "expand",
    "expand_as", "view_as", "reshape_as", "narrow", "select", "chunk", "split", "tensor_split", "split_with_sizes",
    "unbind", "getitem", "contiguous", "to", "type", "type_as", "float", "double", "half", "bfloat16", "cpu", "cuda",
    "detach", "diagonal", "movedim", "moveaxis", "swapaxes", "swapdims", "unfold", "real", "imag", "adjoint",
    "getattr", "dropout", "atleast_1d", "atleast_2d", "atleast_3d", "broadcast_to", "broadcast_tensors", "as_strided",
    "squeeze_", "ravel", "view_as_real", "view_as_complex", "hsplit", "vsplit", "dsplit", "identity", "conj",
    "resolve_conj", "positive", "numpy", "alias", "requires_grad_", "alpha_dropout", "feature_dropout", "dropout1d",
    "dropout2d", "dropout3d", "feature_alpha_dropout", "rearrange",
))  # fmt: skip
"""Names of functions and methods whose result may alias their argument."""

_LAYERS_OF_VIEWS = (
    nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)  # fmt: skip


def settle(graph: fx.Graph, model: nn.Module, constants: Mapping[str, Any]) -> list[tuple[fx.Node, fx.Node]]:
    """Make later operations of a graph use the result of an in-place operation instead of the changed value.

    A changed constant is copied first. Return pairs of nodes: all nodes between the two must be in one stage, because
    they share memory that one of them changes.
    """
    families = _AliasSets(graph, model)
    together: list[tuple[fx.Node, fx.Node]] = []
    for node in list(graph.nodes):
        for value in changed_by(node, model):
            if value.op == "get_attr" and value.target in constants:
                value = _copy_constant(graph, value, families)
            order = {one: number for number, one in enumerate(graph.nodes)}
            family = families.of(value)
            later = [one for one in family if one is not node and any(order[user] > order[node] for user in one.users)]
            if set(later) <= {value} and value.op != "get_attr" and (result := _result_of(node, model)):
                after = {user for user in value.users if order[user] > order[node]}
                value.replace_all_uses_with(result, after.__contains__)
            elif later or value.op == "get_attr":
                is_kept = family[0].op == "get_attr"  # across batches
                users = {user for one in family for user in one.users if user.op != "output"}
                inside = {user for user in users if is_kept or order[user] > order[node]}
                views = (one for one in (value, *later) if one is not family[0] and one.op not in _GIVEN)
                inside |= {node, *views}
                ordered = sorted(inside, key=order.__getitem__)
                together.append((ordered[0], ordered[-1]))
    return together


_GIVEN = ("placeholder", "get_attr")


def changes_of_attributes(graph: fx.Graph, model: nn.Module, constants: Collection[str]) -> list[tuple[fx.Node, str]]:
    """Return the nodes that change a tensor in place that is neither a parameter nor a buffer, with the tensor's name.

    constants: names of tensors that a forward creates.
    """
    families = _AliasSets(graph, model)
    kinds = (model.named_parameters, model.named_buffers)
    known = {*constants, *(name for named in kinds for name, _ in named(remove_duplicate=False))}
    return [
        (node, str(one.target))
        for node in graph.nodes
        for value in changed_by(node, model)
        for one in families.of(value)
        if one.op == "get_attr" and one.target not in known
    ]


def _copy_constant(graph: fx.Graph, constant: fx.Node, families: _AliasSets) -> fx.Node:
    """Return a node that copies a constant in each forward; all users of the constant use the copy."""
    with graph.inserting_after(constant):
        copied = graph.call_method("clone", (constant,))
    copied.meta |= constant.meta
    constant.replace_all_uses_with(copied, lambda user: user is not copied)
    families.replace(constant, copied)
    return copied


def _set_item(value: Any, index: Any, item: Any) -> Any:
    """Set elements of a value, and return it."""
    value[index] = item
    return value


def _result_of(node: fx.Node, model: nn.Module) -> fx.Node | None:
    """Return the node with the result of an in-place operation, if there is one."""
    if node.target is operator.setitem:
        node.target = _set_item
    if node.op == "call_module" and not _is_of_torch(model.get_submodule(str(node.target))):
        return None
    return node


def changed_by(node: fx.Node, model: nn.Module) -> list[fx.Node]:
    """Return the values that an operation may change in place."""
    first = next(iter(node.args), None) or next(iter(node.kwargs.values()), None)
    values = [first] if isinstance(first, fx.Node) else []
    if node.op == "call_method":
        name = str(node.target)
        changes = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
        return values if changes or name in ("__setitem__", "__iadd__", "__imul__") else []
    if node.op == "call_function":
        given = node.kwargs.get("out")
        if isinstance(given, fx.Node):
            return [given]
        name = getattr(node.target, "__name__", "")
        is_named = (name.endswith("_") and not name.endswith("__")) or name == "setitem"
        is_operator = getattr(node.target, "__module__", "") in ("_operator", "operator") and is_operator_in_place(name)
        return values if is_named or is_operator or _is_requested(node, name) else []
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        if not any(getattr(one, "inplace", False) for one in module.modules()):
            return []
        return values if _is_of_torch(module) else node.all_input_nodes
    return []


def _is_requested(node: fx.Node, name: str) -> bool:
    """Return whether a torch.nn.functional call requests in-place work, by keyword or by position."""
    if "inplace" in node.kwargs:
        return node.kwargs["inplace"] is not False
    module = getattr(node.target, "__module__", "") or ""
    return (
        module.startswith("torch")
        and name in _PLACES
        and len(node.args) > (at := _PLACES[name])
        and bool(node.args[at])
    )


_PLACES = {
    "relu": 1, "relu6": 1, "selu": 1, "silu": 1, "mish": 1, "hardswish": 1, "hardsigmoid": 1, "elu": 2, "celu": 2,
    "leaky_relu": 2, "threshold": 3, "hardtanh": 3, "rrelu": 4, "dropout": 3, "dropout1d": 3, "dropout2d": 3,
    "dropout3d": 3, "alpha_dropout": 3, "feature_alpha_dropout": 3,
}  # fmt: skip
"""The position of `inplace` in functions of torch.nn.functional."""


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.modules.")


class _AliasSets:
    """Sets of values that may share memory."""

    def __init__(self, graph: fx.Graph, model: nn.Module) -> None:
        self._of: dict[fx.Node, list[fx.Node]] = {}
        for node in graph.nodes:
            own = [node]
            for source in node.all_input_nodes if _may_share(node, model) else changed_by(node, model):
                own = [*self._of[source], *(one for one in own if one not in self._of[source])]
            for member in own:
                self._of[member] = own

    def of(self, node: fx.Node) -> list[fx.Node]:
        """Return a value and its possible aliases, in graph order."""
        return self._of[node]

    def replace(self, node: fx.Node, other: fx.Node) -> None:
        """Replace a node by another one."""
        family = [other if one is node else one for one in self._of.pop(node)]
        self._of[node] = [node]
        for one in family:
            self._of[one] = family


def _may_share(node: fx.Node, model: nn.Module) -> bool:
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        return isinstance(module, _LAYERS_OF_VIEWS) or not type(module).__module__.startswith("torch.nn")
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.op in ("call_method", "call_function") and name in _VIEWS
