"""VerbMaker: make the functions that users call from functions that build calls."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from commlib.arguments import suggest
from commlib.tensor_verbs.call import Startable
from commlib.tensor_verbs.tensor_work import TensorWork

P = ParamSpec("P")
R = TypeVar("R")


def _run(call: Startable[Any]) -> Any:
    return call.run()


def _start(call: Startable[Any]) -> Any:
    return call.start()


def _name(build: Callable[..., Any]) -> str:
    return build.__name__.lstrip("_")


def _unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _check_arguments(verb: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Raise TypeError if a call has other arguments than its verb: Python's names the function that builds calls."""
    signature = inspect.signature(verb)
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        unknown = [name for name in options if name not in signature.parameters]
        hint = suggest(unknown[0], signature.parameters) if unknown else ""
        raise TypeError(f"{verb.__name__}() {error}{hint}") from None


@dataclass(frozen=True, slots=True)
class VerbMaker:
    """Makes two verbs from `build`, which returns a verb ready to run: one that waits and its `_async` twin.

    Both have the arguments of `build`, whose name may begin with an underscore, and the first has its docstring.
    module, tensor: the module of the verbs, and the name of the tensor class in their signatures. run, start: run or
    start a built call; an adapter that records gradients or builds graphs replaces them (`commlib.autodiff.find_rule`
    returns the rule of a backward). decorate: decorator of both verbs.
    """

    module: str
    tensor: str
    run: Callable[[Any], Any] = _run
    start: Callable[[Any], Any] = _start
    decorate: Callable[[Callable[..., Any]], Callable[..., Any]] = _unchanged

    def __call__(self, build: Callable[P, Startable[R]]) -> tuple[Callable[P, R], Callable[P, TensorWork[R]]]:
        """Return the verb that waits for its result, and the one that returns a TensorWork."""
        return self.waiting(build), self.starting(build)

    def waiting(self, build: Callable[P, Startable[R]]) -> Callable[P, R]:
        """Return the verb that waits for its result."""
        run = self.run

        def verb(*arguments: P.args, **options: P.kwargs) -> R:
            try:
                call = build(*arguments, **options)
            except TypeError:
                _check_arguments(verb, arguments, options)
                raise
            answer: R = run(call)
            return answer

        self._dress(verb, build, _name(build), inspect.getdoc(build) or "", r"\1")
        decorated: Callable[P, R] = self.decorate(verb)
        return decorated

    def starting(self, build: Callable[P, Startable[R]]) -> Callable[P, TensorWork[R]]:
        """Return the verb that returns a TensorWork at once."""
        start = self.start

        def verb(*arguments: P.args, **options: P.kwargs) -> TensorWork[R]:
            try:
                call = build(*arguments, **options)
            except TypeError:
                _check_arguments(verb, arguments, options)
                raise
            work: TensorWork[R] = start(call)
            return work

        waits = _name(build)
        name = f"{waits[:-1]}_async_" if waits.endswith("_") else f"{waits}_async"
        self._dress(verb, build, name, f"Start `{waits}`.", r"Work[\1]")
        decorated: Callable[P, TensorWork[R]] = self.decorate(verb)
        return decorated

    def _dress(
        self, function: Callable[..., Any], build: Callable[..., Any], name: str, text: str, returns: str
    ) -> None:
        """Set the name, docstring and signature of `function` that a user reads."""
        function.__name__ = function.__qualname__ = name
        function.__code__ = function.__code__.replace(co_name=name, co_qualname=name)
        function.__module__, function.__doc__ = self.module, text
        signature = inspect.signature(build)
        parameters_of_verb = [
            parameter.replace(annotation=re.sub(r"\bT\b", self.tensor, str(parameter.annotation)))
            for parameter in signature.parameters.values()
        ]
        answer = re.sub(r"^\w+\[(.*)\]$", returns, str(signature.return_annotation))
        function.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=parameters_of_verb, return_annotation=re.sub(r"\bT\b", self.tensor, answer)
        )
