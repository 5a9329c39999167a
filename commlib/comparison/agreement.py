"""Agreement: what ranks must say alike is compared; what one rank finds wrong is raised on all of them.

So none waits for the others, or computes with what they mean otherwise.
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
from commlib.comparison.parameter_check import Gathers, check_agreement
from commlib.errors import CommlibError, MismatchError, UsageError

_T = TypeVar("_T")


def together(comm: Gathers, run: Callable[[], _T]) -> _T:
    """Return what `run` returns here; if it raises on any rank, raise on all. Collective.

    All raise UsageError, with the message of the first rank that has one, and the ranks that do; but a rank on which
    something else was raised raises that. What a group itself has raised, as MismatchError, is raised at once,
    and so is what `run` raised here while other ranks made other calls.
    """
    raised: Exception | None = None
    try:
        result = run()
    except Exception as error:
        if isinstance(error, CommlibError) and not isinstance(error, UsageError):
            raise
        raised = error
    try:
        everyone = comm.all_gather_object("" if raised is None else _said(raised))
    except MismatchError as error:  # a rank on which nothing was wrong had other calls to make first
        raise error if raised is None else raised from None
    text = next((said for said in everyone if said), "")
    if not text:
        return result
    ranks = [rank for rank, said in enumerate(everyone) if said == text]
    if raised is not None and (len(ranks) == comm.size or not isinstance(raised, UsageError)):
        raise raised
    raise UsageError(f"{text} (on ranks {ranks} of {comm.size})") from raised


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"


class Agreement:
    """What ranks must say alike of a layer that they share: compared where all make it, and once when it is used.

    comm: the ranks. kind, name: of the layer. It is numbered in the order in which this process makes layers on `comm`.
    """

    def __init__(self, comm: Communicator, kind: str, name: str = "") -> None:
        self._comm, self._name = comm, kind if name in ("", kind) else f"{name}, {kind}"
        self._number = comm.kept["layers"] = comm.kept.get("layers", -1) + 1
        self._settled: set[str] = set()

    def settle(self, when: str, options: Mapping[str, Any]) -> None:
        """Compare what ranks say, the first time that this happens. Collective: one small message, then none.

        Raises MismatchError on all ranks, with the first option that differs.
        """
        if when not in self._settled and self._comm.size > 1:
            self._settled.add(when)
            layer = f"layer {self._number} of {self._comm.name}: {self._name}"
            what = f"{self._name} on {self._comm.name}, {when}"
            # No message of objects, which `together` sends: a rank that has failed meanwhile is not taken for one here.
            told(self._comm, what, [layer, *(f"{name}: {said(value)}" for name, value in options.items())])

    def is_settled(self, when: str) -> bool:
        """Return whether this was compared already."""
        return when in self._settled

    def __deepcopy__(self, memo: Any) -> Agreement:
        found = object.__new__(Agreement)
        vars(found).update(vars(self), _settled=set(self._settled))
        return found


def agree_on_call(
    comm: Communicator, what: str, *, plan: Any, verify: Any, example: Any, codec: Any = None, output: bool = False
) -> None:
    """Compare how ranks call what divides a model, before they go on in ways that do not meet. Collective.

    Raises MismatchError on all ranks.
    """
    options = {
        "plan": plan if isinstance(plan, str) else "styles", "verify": _is_given(verify),
        "example": _is_given(example), "codec": codec, "divided_output": output,
    }  # fmt: skip
    if comm.size > 1:
        told(comm, what, [f"{name}: {said(value)}" for name, value in options.items()])


def _is_given(value: Any) -> str:
    return "none" if value is None else "given"


def options_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, as options."""
    return {one.name: getattr(value, one.name) for one in fields(value)}


def said(value: Any) -> str:
    """Return a value as text that is the same on all ranks for the same value.

    Functions are told by their names, those whose names do not say which they are by their code, too; partial ones by
    what they are made of.
    """
    if is_dataclass(value) and not isinstance(value, type):
        inner = ", ".join(f"{name}={said(one)}" for name, one in options_of(value).items())
        return f"{type(value).__name__}({inner})"
    if isinstance(value, partial):
        options = [f"{name}={said(one)}" for name, one in value.keywords.items()]
        return f"partial({', '.join([said(value.func), *map(said, value.args), *options])})"
    if callable(value) and hasattr(value, "__qualname__"):
        owner = getattr(value, "__objclass__", None) or type(getattr(value, "__self__", None))
        name = f"{getattr(value, '__module__', None) or owner.__module__}.{value.__qualname__}"
        is_local = isinstance(value, FunctionType) and "<" in value.__qualname__
        return f"{name} of code {digest_of(_lines_of(value.__code__)):x}" if is_local else name
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text


def lines_of(layer: str, options: Mapping[str, Any]) -> list[str]:
    """Return what ranks compare of a layer's options, a line for each."""
    return [f"{layer}: {name}={said(value)}" for name, value in options.items()]


def _lines_of(code: CodeType) -> list[str]:
    """Return what a function does, wherever it stands."""
    found = [code.co_code.hex(), *code.co_names]
    for one in code.co_consts:
        if isinstance(one, CodeType):
            found += _lines_of(one)
        else:
            found.append(repr(sorted(map(repr, one)) if isinstance(one, frozenset) else one))
    return found


def digest_of(lines: Sequence[str]) -> int:
    """Return 63 bits that tell texts apart."""
    return int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:8]) >> 1


def told(comm: Communicator, what: str, lines: Sequence[str], number: int = 0) -> tuple[int, ...]:
    """Return the number that each rank gives. Collective: one small message.

    Raises MismatchError on all ranks if `lines`, what they are about to call, differ.
    """
    return tuple(number for (number,) in all_told(comm, what, lines, (number,)))


def all_told(comm: Communicator, what: str, lines: Sequence[str], numbers: Sequence[int]) -> list[list[int]]:
    """Return the numbers that each rank gives: as `told`."""
    everyone = comm.all_gather(np.array([[digest_of(lines), *numbers]], np.int64)).tolist()
    if len({digest for digest, *_ in everyone}) > 1:
        check_agreement(comm, what, lines)
    return [given for _, *given in everyone]


def or_refused(comm: Communicator, what: str, make: Callable[[], _T], numbers: int = 1) -> _T:
    """Return what `make` returns. Not collective, unless it raises UsageError: then other ranks are told.

    These wait in `told`, or `all_told` with as many numbers, for what this rank is about to call. They raise
    MismatchError, or UsageError as this rank does.
    """
    try:
        return make()
    except UsageError as error:
        if comm.size > 1:
            with suppress(MismatchError):  # this rank's own error says more
                all_told(comm, what, [what, f"refused: {error}"], (0,) * numbers)
        raise
