"""Loss calls: record the calls of torch's losses in a function, and count the terms of each mean."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from operator import is_
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import _reduction
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

Count = float | Tensor
"""A number of terms; a tensor if reading it would make the host wait for a device."""

Manner = tuple[Any, tuple[Any, ...], dict[str, Any], Any]
"""A call of one of torch's losses: the function, its options, the types of its tensors."""


@dataclass(frozen=True, slots=True)
class LossCall:
    """A call of one of torch's losses. count: its terms, None if unknown. target: None if it has none.

    classes: (ignore_index, weight) if terms of a class may count less, otherwise None. has_weights: the count is the
    sum of elementwise weights, and target is these weights.
    """

    reduction: str
    result: Any
    input: Tensor
    target: Tensor | None
    count: Count | None
    classes: tuple[int, Tensor | None] | None
    has_weights: bool = False


class LossCalls(TorchFunctionMode):
    """Records the calls of torch's losses within the context: outermost calls only, such as a module's."""

    def __init__(self) -> None:
        super().__init__()
        self._recorded: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, and record it if it is a loss."""
        if function is F.l1_loss:
            kwargs = {**_weight_left_out(inspect.currentframe()), **(kwargs or {})}
        result = function(*args, **(kwargs or {}))
        if function in _READ:
            self._recorded.append((function, args, kwargs or {}, result))
        return result

    @property
    def recorded(self) -> list[LossCall]:
        """The recorded calls, in order."""
        return [_read(*call) for call in self._recorded]

    def alone(self, output: Any, target: Any, loss: Any) -> Manner | None:
        """Return the only call if it took the output and the target and returned the loss, otherwise None."""
        if len(self._recorded) != 1:
            return None
        function, args, kwargs, result = self._recorded[0]
        if result is not loss or len(args) < 2 or args[0] is not output or args[1] is not target:
            return None
        of, to = output.shape, target.shape
        return function, args[2:], kwargs, (target.dtype, of[1:], to[1:], of[:1] == to[:1])


def count_of_classes(target: Tensor, ignore_index: int, weight: Tensor | None) -> Tensor:
    """Return the sum of the weights of the classes that are not ignored, the divisor of cross entropy."""
    counted = target != ignore_index
    if weight is None:
        return counted.sum()
    places = torch.where(counted, target, 0).to(torch.int64)
    return (weight.detach()[places] * counted).sum(dtype=torch.float64)


def is_same(one: Manner | None, other: Manner | None) -> bool:
    """Return whether two calls of torch's losses have identical options and values of the same types."""
    if one is None or other is None or one[0] is not other[0] or one[3] != other[3]:
        return False
    options, others = (*one[1], *one[2], *one[2].values()), (*other[1], *other[2], *other[2].values())
    return len(options) == len(others) and all(map(is_, options, others))


def _read(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> LossCall:
    given = dict(_defaults(function))
    given.update(zip(given, args, strict=False))
    given.update(kwargs)
    reduction = given["reduction"]
    if given.get("size_average") is not None or given.get("reduce") is not None:
        reduction = _reduction.legacy_get_string(given["size_average"], given["reduce"], emit_warning=False)
    first, target = next(iter(given.values())), given.get("target", given.get("targets"))
    given = {**given, "reduction": reduction}
    try:
        with torch.no_grad():
            count, classes = _READ[function](given, first, target)
    except (RuntimeError, IndexError):  # of shapes that only the loss itself handles
        count, classes = None, None
    if has_weights := count is not None and _is_over_weights(function, given):
        target = given["weight"]
    return LossCall(reduction, result, first, target, count, classes, has_weights)


def _weight_left_out(frame: FrameType | None) -> dict[str, Any]:
    """Return the weight of a F.l1_loss call; torch 2.13 omits it from the intercepted call."""
    while frame is not None and frame.f_code is not F.l1_loss.__code__:
        frame = frame.f_back
    return {} if frame is None or frame.f_locals.get("weight") is None else {"weight": frame.f_locals["weight"]}


@cache
def _defaults(function: Any) -> dict[str, Any]:
    """Return a function's parameters in order, with their defaults. The function has accepted its arguments before."""
    return {name: one.default for name, one in inspect.signature(function).parameters.items()}


_Counted = tuple[Count | None, tuple[int, Tensor | None] | None]


def _classes(given: dict[str, Any], value: Tensor, target: Tensor) -> _Counted:
    """Count class indices; for class probabilities count elements, because the number of classes is constant."""
    if target.is_floating_point():
        return float(target.numel()), None
    classes = given["ignore_index"], given["weight"]
    return count_of_classes(target, *classes), classes


def _elements(given: dict[str, Any], value: Tensor, target: Tensor) -> _Counted:
    shapes = {one.shape for one in given.values() if isinstance(one, Tensor)}
    # torch's function for it costs as much as a small layer
    shape = shapes.pop() if len(shapes) == 1 else torch.broadcast_shapes(*shapes)
    return float(math.prod(shape)), None


def _weighted_elements(given: dict[str, Any], value: Tensor, target: Tensor) -> _Counted:
    """Count elements; with `weight`, the sum of weights, which is torch's divisor."""
    weight = given["weight"]
    if weight is None or given["reduction"] != "mean":
        return _elements(given, value, target)
    return (None if weight.requires_grad else weight.sum(dtype=torch.float64)), None


def _is_over_weights(function: Any, given: dict[str, Any]) -> bool:
    weighted = _READ[function] is _weighted_elements and given["weight"] is not None
    return weighted and given["reduction"] == "mean"


def _divergences(given: dict[str, Any], value: Tensor, target: Tensor) -> _Counted:
    if given["reduction"] == "batchmean" and value.ndim:
        return float(value.shape[0]), None
    return _elements(given, value, target)


def _rows(given: dict[str, Any], value: Tensor, target: Tensor | None) -> _Counted:
    return float(value.shape[0] if value.ndim > 1 else 1), None


def _sequences(given: dict[str, Any], value: Tensor, target: Tensor) -> _Counted:
    return float(value.shape[1] if value.ndim > 2 else 1), None


_READ: dict[Any, Callable[[dict[str, Any], Any, Any], _Counted]] = {
    F.cross_entropy: _classes,
    F.nll_loss: _classes,
    F.kl_div: _divergences,
    F.ctc_loss: _sequences,
    **dict.fromkeys((F.mse_loss, F.l1_loss), _weighted_elements),
    **dict.fromkeys((F.smooth_l1_loss, F.huber_loss), _elements),  # huber_loss does not divide by the weights
    **dict.fromkeys(
        (F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.poisson_nll_loss, F.gaussian_nll_loss), _elements
    ),
    **dict.fromkeys((F.soft_margin_loss, F.hinge_embedding_loss, F.margin_ranking_loss), _elements),
    **dict.fromkeys(
        (F.multi_margin_loss, F.multilabel_margin_loss, F.multilabel_soft_margin_loss, F.cosine_embedding_loss), _rows
    ),
    **dict.fromkeys((F.triplet_margin_loss, F.triplet_margin_with_distance_loss), _rows),
}


# Counting the terms of all microbatches, after the first loss


@dataclass(frozen=True, slots=True, eq=False)
class CountRule:
    """Counts the terms of a microbatch in its target, before its loss is computed.

    leaf: the target's tensor with the terms; shifted: without its first column, as for next-token targets. classes: as
    in `LossCall`; None: the terms are elements, or rows (by_rows), or the sum of elements (by_weights). is_sum: the
    losses are sums.
    """

    leaf: int
    shifted: bool
    classes: tuple[int, Tensor | None] | None
    by_rows: bool
    is_sum: bool
    by_weights: bool = False

    def equals(self, other: CountRule | None) -> bool:
        """Return whether another rule gives the same counts."""
        if other is None or self._simple() != other._simple():
            return False
        if self.classes is None or other.classes is None:
            return self.classes is other.classes
        return self.classes[0] == other.classes[0] and self.classes[1] is other.classes[1]

    def _simple(self) -> tuple[int, bool, bool, bool, bool]:
        return self.leaf, self.shifted, self.by_rows, self.is_sum, self.by_weights

    def counts(self, targets: Sequence[Any]) -> list[float]:
        """Return the terms of each microbatch."""
        counts: list[Count] = []
        for target in targets:
            tensor = _leaves(target)[self.leaf]
            tensor = tensor[:, 1:] if self.shifted else tensor
            if self.classes is not None:
                counts.append(count_of_classes(tensor, *self.classes))
            elif self.by_weights:
                counts.append(tensor.detach().sum(dtype=torch.float64))
            else:
                counts.append(float(tensor.shape[0] if self.by_rows else tensor.numel()))
        return as_numbers(counts)


def as_numbers(counts: Sequence[Count]) -> list[float]:
    """Return numbers of terms on the host; the host waits for a device once."""
    tensors = [count.to(torch.float64) for count in counts if isinstance(count, Tensor)]
    values = iter(torch.stack(tensors).tolist() if tensors else ())
    return [next(values) if isinstance(count, Tensor) else count for count in counts]


def rules_of(call: LossCall, target: Any) -> tuple[list[CountRule], bool]:
    """Return the rules that count the terms of a called loss in the target, and whether they are certain.

    They are certain only if the loss took a tensor of the target, or a view of all of it. Otherwise the rules are those
    of the tensors with the same values, possibly expanded: of one that shares memory with the loss's target, or of all.
    """
    if call.target is None or call.count is None:
        return [], False
    rules: list[tuple[CountRule, Tensor]] = []
    for place, leaf in enumerate(_leaves(target)):
        if not leaf.ndim:
            continue
        for shifted in (False, True) if leaf.ndim > 1 else (False,):
            tensor = leaf[:, 1:] if shifted else leaf
            if not tensor.numel():
                continue
            times, rest = divmod(call.target.numel(), tensor.numel())
            if rest or not times or not (times == 1 or call.has_weights):  # weights of rows may have been expanded
                continue
            by_rows = call.classes is None and not call.has_weights and float(call.count) != tensor.numel()
            if by_rows and call.count != tensor.shape[0]:
                continue  # for example of (8, 1) and (8), which are 64 terms
            rule = CountRule(place, shifted, call.classes, by_rows, call.reduction == "sum", call.has_weights)
            if is_view(call.target, tensor):
                return [rule], True
            rules.append((rule, tensor))
    same = [(rule, tensor) for rule, tensor in rules if _is_expanded(tensor, call.target)]
    own = [rule for rule, tensor in same if tensor.data_ptr() == call.target.data_ptr()]
    return own[:1] or [rule for rule, _ in same], False


def _is_expanded(one: Tensor, other: Tensor) -> bool:
    """Return whether a tensor repeats each element of another equally often."""
    times = other.numel() // one.numel()
    return torch.equal(one.to(other.dtype).reshape(-1, 1).expand(-1, times), other.reshape(-1, times))


def is_view(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same elements in the same order."""
    if one is other:
        return True
    same = one.dtype == other.dtype and one.numel() == other.numel() and one.data_ptr() == other.data_ptr()
    return same and one.is_contiguous() and other.is_contiguous()


def _leaves(target: Any) -> list[Tensor]:
    if isinstance(target, Tensor):
        return [target]
    return [leaf for leaf in pytree.tree_leaves(target) if isinstance(leaf, Tensor)]
