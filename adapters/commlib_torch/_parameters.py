"""Which parameters a reducer manages, under which names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from commlib.errors import UsageError
from commlib_torch._backward import backward_passes
from commlib_torch._bridge import check_dense, dtype_name

Named = tuple[str, Tensor]


def unique_parameters(named: Iterable[Named]) -> list[Named]:
    """Return those that require gradients, each under its first name, in order. Raises UsageError for a name twice."""
    seen: dict[int, str] = {}
    names: set[str] = set()
    result: list[Named] = []
    for name, parameter in named:
        if id(parameter) in seen:
            continue
        if name in names:
            raise UsageError(f"two parameters are named {name!r}")
        seen[id(parameter)] = name
        names.add(name)
        if parameter.requires_grad:
            result.append((name, parameter))
    return result


def check_parameters(parameters: Sequence[Named]) -> None:
    """Raise UsageError unless all of them can be managed, and nobody else does already."""
    for name, parameter in parameters:
        try:
            check_dense(parameter)
        except UsageError as error:
            raise UsageError(f"parameter {name}: {error}") from error
        if not parameter.is_leaf:
            raise UsageError(f"parameter {name} is not a leaf of autograd's graph, so it never gets a gradient")
    for member in backward_passes.members:
        for name, parameter in parameters:
            if parameter in member:
                raise UsageError(
                    f"the gradient of {name} is already reduced by another DistributedOptimizer or DataParallel: "
                    "use one of them"
                )


def describe(name: str, parameter: Tensor) -> str:
    """Return what all ranks must agree on about a parameter."""
    return f"{name}: {dtype_name(parameter.dtype)}{list(parameter.shape)}"


def shape_of(name: str, parameter: Tensor) -> tuple[str, tuple[int, ...]]:
    """Return the name and the shape of a parameter's gradient as it is sent: complex numbers are pairs."""
    shape = tuple(parameter.shape)
    return name, (*shape, 2) if parameter.is_complex() else shape
