"""LayerAgreement: compare the arguments that must be equal on all ranks, and raise one rank's error on all of them.

So no rank waits for the others in vain, or computes with different arguments.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import partial
from types import CodeType, FunctionType
from typing import Any, TypeVar

import numpy as np

from commlib.communicator import Communicator
from commlib.comparison.parameter_check import GatherRanks, check_agreement
from commlib.errors import CommlibError, MismatchError, UsageError

_T = TypeVar("_T")


def run_together(comm: GatherRanks, run: Callable[[], _T]) -> _T:
    """Run `run` on all ranks and return its result; if it raises on any rank, raise on all. Collective.

    All ranks raise UsageError, with the message of the first failed rank, and the list of ranks that have it. A rank
    with another kind of error raises its own. Errors raised by a group, such as MismatchError, are raised at once, and
    so are errors of `run` while other ranks make other calls.
    """
    raised: Exception | None = None
    try:
        result = run()
    except Exception as error:
        if isinstance(error, CommlibError) and not isinstance(error, UsageError):
            raise
        raised = error
    try:
        everyone = comm.all_gather_object("" if raised is None else _error_text(raised))
    except MismatchError as error:  # a rank without an error had other calls to make first
        raise error if raised is None else raised from None
    text = next((message for message in everyone if message), "")
    if not text:
        return result
    ranks = [rank for rank, message in enumerate(everyone) if message == text]
    if raised is not None and (len(ranks) == comm.size or not isinstance(raised, UsageError)):
        raise raised
    raise UsageError(f"{text} (on ranks {ranks} of {comm.size})") from raised


def _error_text(error: Exception) -> str:
    return str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"


class LayerAgreement:
    """Agreement on the options of a layer that ranks share: compared when all make it, and once when it is used.

    comm: the ranks. kind, name: of the layer. Layers are numbered in the order in which this process makes them on
    `comm`.
    """

    def __init__(self, comm: Communicator, kind: str, name: str = "") -> None:
        self._comm, self._name = comm, kind if name in ("", kind) else f"{name}, {kind}"
        self._number = comm.cached["layers"] = comm.cached.get("layers", -1) + 1
        self._compared: set[str] = set()

    def settle(self, when: str, options: Mapping[str, Any]) -> None:
        """Compare options between ranks, at the first call for `when`. Collective then: one small message.

        Raises MismatchError on all ranks, with the first option that differs.
        """
        if when not in self._compared and self._comm.size > 1:
            self._compared.add(when)
            layer = f"layer {self._number} of {self._comm.name}: {self._name}"
            what = f"{self._name} on {self._comm.name}, {when}"
            # Not `run_together`: its message of objects would be taken for another call if a rank has failed meanwhile.
            agree_on_number(
                self._comm, what, [layer, *(f"{name}: {describe(value)}" for name, value in options.items())]
            )

    def is_settled(self, when: str) -> bool:
        """Return whether options were compared for `when`."""
        return when in self._compared

    def __deepcopy__(self, memo: Any) -> LayerAgreement:
        clone = object.__new__(LayerAgreement)
        vars(clone).update(vars(self), _compared=set(self._compared))
        return clone


def agree_on_call(
    comm: Communicator, what: str, *, plan: Any, verify: Any, example: Any, codec: Any = None, output: bool = False
) -> None:
    """Compare the arguments with which ranks shard a model, before their collectives diverge. Collective.

    Raises MismatchError on all ranks.
    """
    options = {
        "plan": plan if isinstance(plan, str) else "styles", "verify": _is_given(verify),
        "example": _is_given(example), "codec": codec, "divided_output": output,
    }  # fmt: skip
    if comm.size > 1:
        agree_on_number(comm, what, [f"{name}: {describe(value)}" for name, value in options.items()])


def _is_given(value: Any) -> str:
    return "none" if value is None else "given"


def options_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, as options."""
    return {one.name: getattr(value, one.name) for one in fields(value)}


def describe(value: Any) -> str:
    """Return a value as text that is the same on all ranks for the same value.

    Functions are described by name, lambdas and local functions by their code, too; partial functions by their function
    and arguments.
    """
    if is_dataclass(value) and not isinstance(value, type):
        inner = ", ".join(f"{name}={describe(one)}" for name, one in options_of(value).items())
        return f"{type(value).__name__}({inner})"
    if isinstance(value, partial):
        options = [f"{name}={describe(one)}" for name, one in value.keywords.items()]
        return f"partial({', '.join([describe(value.func), *map(describe, value.args), *options])})"
    if callable(value) and hasattr(value, "__qualname__"):
        owner = getattr(value, "__objclass__", None) or type(getattr(value, "__self__", None))
        name = f"{getattr(value, '__module__', None) or owner.__module__}.{value.__qualname__}"
        is_local = isinstance(value, FunctionType) and "<" in value.__qualname__
        return f"{name} of code {digest_of(_lines_of(value.__code__)):x}" if is_local else name
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text


def lines_of(layer: str, options: Mapping[str, Any]) -> list[str]:
    """Return a layer's options as lines that ranks compare."""
    return [f"{layer}: {name}={describe(value)}" for name, value in options.items()]


def _lines_of(code: CodeType) -> list[str]:
    """Return the contents of a function's code as lines, independent of its location."""
    lines = [code.co_code.hex(), *code.co_names]
    for one in code.co_consts:
        if isinstance(one, CodeType):
            lines += _lines_of(one)
        else:
            lines.append(repr(sorted(map(repr, one)) if isinstance(one, frozenset) else one))
    return lines


def digest_of(lines: Sequence[str]) -> int:
    """Return a digest of texts, 63 bits."""
    return int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:8]) >> 1


def agree_on_number(comm: Communicator, what: str, lines: Sequence[str], number: int = 0) -> tuple[int, ...]:
    """Return the number that each rank passes. Collective: one small message.

    Raises MismatchError on all ranks if `lines`, which describe the next call, differ.
    """
    return tuple(number for (number,) in agree_on_numbers(comm, what, lines, (number,)))


def agree_on_numbers(comm: Communicator, what: str, lines: Sequence[str], numbers: Sequence[int]) -> list[list[int]]:
    """Return the numbers that each rank passes, like `agree_on_number`."""
    everyone = comm.all_gather(np.array([[digest_of(lines), *numbers]], np.int64)).tolist()
    if len({digest for digest, *_ in everyone}) > 1:
        check_agreement(comm, what, lines)
    return [given for _, *given in everyone]


def make_or_refuse(comm: Communicator, what: str, make: Callable[[], _T], numbers: int = 1) -> _T:
    """Return the result of `make`. Not collective, unless it raises UsageError: then the other ranks are informed.

    Other ranks wait in `agree_on_number`, or in `agree_on_numbers` with as many numbers, for this rank's next call.
    They raise MismatchError, or UsageError if they fail like this rank.
    """
    try:
        return make()
    except UsageError as error:
        if comm.size > 1:
            with suppress(MismatchError):  # this rank's own error is more specific
                agree_on_numbers(comm, what, [what, f"refused: {error}"], (0,) * numbers)
        raise
