"""Call signatures: the arguments of a module's calls, which of them may differ, and which a trace has fixed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from commlib.errors import UsageError


class _TensorPlaceholder:
    """A placeholder of a tensor."""

    def __repr__(self) -> str:
        return "a tensor"

    def __reduce__(self) -> str:
        return "GIVEN"


GIVEN = _TensorPlaceholder()


def describe_arguments(example: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with GIVEN in place of tensors, so that they can be sent to other ranks."""
    return pytree.tree_map_only(Tensor, lambda _: GIVEN, example)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class ForwardCall:
    """A call of a module's forward: the values of its parameters by name, GIVEN for tensors.

    free: names of values that may differ from call to call. All others are fixed.
    """

    signature: inspect.Signature
    values: dict[str, Any]
    passed: frozenset[str]
    """The parameters that were passed; all others have their defaults."""
    free: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module, example: tuple[Any, Any] | None) -> ForwardCall:
        """Return the call of an example (see `describe_arguments`), or the call with defaults."""
        signature = inspect.signature(model.forward)
        if example is None:
            values = {
                name: GIVEN if parameter.default is parameter.empty else parameter.default
                for name, parameter in signature.parameters.items()
                if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            }
            needed = frozenset(name for name, value in values.items() if value is GIVEN)
            values |= {
                name: () if parameter.kind is parameter.VAR_POSITIONAL else {}
                for name, parameter in signature.parameters.items()
                if name not in values
            }
            return cls(signature, values, needed, frozenset()).with_free(())
        bound = _bound(signature, *example)
        given = frozenset(bound.arguments)
        bound.apply_defaults()
        return cls(signature, dict(bound.arguments), given, frozenset()).with_free(())

    def with_free(self, names: Collection[str]) -> ForwardCall:
        """Return the same call with more free values among those that are not tensors."""
        tensors = {name for name, value in self.leaves() if value is GIVEN}
        return ForwardCall(self.signature, self.values, self.passed, frozenset({*tensors, *names}))

    def leaves(self) -> list[tuple[str, Any]]:
        """Return each value with its name, containers element by element."""
        leaves_by_name: list[tuple[str, Any]] = []
        for name, value in self.values.items():
            leaves = _leaves(value)
            leaves_by_name += (
                [(name, value)] if leaves is None else [(f"{name}_{n}", one) for n, one in enumerate(leaves)]
            )
        return leaves_by_name

    def arguments(self, free: Callable[[str], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, with free values replaced by `free(name)`."""
        values = {}
        for name, value in self.values.items():
            leaves = _leaves(value)
            if leaves is None:
                values[name] = free(PREFIX + name) if name in self.free else value
                continue
            named = [(f"{name}_{n}", one) for n, one in enumerate(leaves)]
            nodes = [free(PREFIX + place) if place in self.free else one for place, one in named]
            values[name] = pytree.tree_unflatten(nodes, pytree.tree_flatten(value)[1])
        bound = inspect.BoundArguments(self.signature, values)
        return bound.args, bound.kwargs

    def values_of(self, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
        """Return the free values of a call, by their names in graphs. Raises UsageError if other values differ."""
        bound = _bound(self.signature, args, options)
        bound.apply_defaults()
        values: dict[str, Any] = {}
        for name, expected in self.values.items():
            value = bound.arguments[name]
            leaves = _leaves(expected)
            if leaves is None:
                self._take(values, name, value, expected)
                continue
            ours, spec = pytree.tree_flatten(value)
            if spec != pytree.tree_flatten(expected)[1]:
                raise self._other(name, f"a {type(value).__name__} of {len(ours)} values", f"{len(leaves)} in a nest")
            for number, (one, other) in enumerate(zip(ours, leaves, strict=True)):
                self._take(values, f"{name}_{number}", one, other)
        return values

    def _take(self, values: dict[str, Any], name: str, value: Any, expected: Any) -> None:
        if name in self.free:
            if expected is GIVEN and value is None:
                raise self._other(name, "None", "a tensor")
            values[PREFIX + name] = value
        elif value is not expected and (type(value) is not type(expected) or value != expected):
            text = "a tensor" if isinstance(value, Tensor) else repr(value)
            raise self._other(name, text, repr(expected))

    def _other(self, name: str, text: str, expected: str) -> UsageError:
        return UsageError(
            f"pipeline: forward's {name} is {text}; the model was split for {name} = {expected}, and its operations "
            "depend on it: pass pipeline(example=) with the arguments of each step"
        )


PREFIX = "given_"
"""Prefix of names in graphs: parameter names may be reserved there."""


def _leaves(value: Any) -> list[Any] | None:
    """Return the values in a container with tensors; None for a single value."""
    if not isinstance(value, tuple | list | dict):
        return None
    leaves = pytree.tree_leaves(value)
    return leaves if any(leaf is GIVEN for leaf in leaves) else None


def _bound(signature: inspect.Signature, args: tuple[Any, ...], options: dict[str, Any]) -> inspect.BoundArguments:
    try:
        return signature.bind(*args, **options)
    except TypeError as error:
        raise UsageError(f"pipeline: x does not fit forward{signature}: {error}") from error
