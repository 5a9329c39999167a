"""The backward of each ordered verb follows the rules, and every verb of a tensor has a backward or a reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from commlib.autodiff import TRANSPOSED, find_rule
from commlib.errors import UsageError
from commlib.tensor_verbs import Bridge, CallNumbers, OrderedVerbs, ReturningVerbs, TensorCall, VerbGradients
from tests.bodies.loopback import run


@dataclass
class Form:
    """The form of an input of four numbers."""

    length: int | None = 4

    def zeros(self) -> Any:
        return np.zeros(4)

    def rows(self) -> Any:
        return np.array([4])


BRIDGE: Bridge[Any] = Bridge(np.ndarray, lambda array: array, lambda array: array)
ORDERED, RETURNING = OrderedVerbs(BRIDGE), ReturningVerbs(BRIDGE)
WAY_OUT = "pass it without one"

CALLS: dict[str, Any] = {
    "all_reduce": lambda x, comm: ORDERED.all_reduce(x, "mean", ranks=comm),
    "reduce_scatter": lambda x, comm: ORDERED.reduce_scatter(x, ranks=comm),
    "reduce_scatter_v": lambda x, comm: ORDERED.reduce_scatter_v(x, [1, 3], ranks=comm),
    "scan": lambda x, comm: ORDERED.scan(x, ranks=comm),
    "broadcast": lambda x, comm: ORDERED.broadcast(x, ranks=comm),
    "all_gather": lambda x, comm: ORDERED.all_gather(x, ranks=comm),
    "all_gather_v": lambda x, comm: ORDERED.all_gather_v(x, ranks=comm),
    "scatter": lambda x, comm: ORDERED.scatter(x, ranks=comm),
    "all_to_all": lambda x, comm: ORDERED.all_to_all(x, ranks=comm),
    "all_to_all_v": lambda x, comm: ORDERED.all_to_all_v(x, [2, 2], ranks=comm),
    "send_recv": lambda x, comm: RETURNING.send_recv(x, 1 - comm.rank, x, 1 - comm.rank, ranks=comm),
}
REFUSED: dict[str, Any] = {
    "reduce": lambda x, comm: ORDERED.reduce(x, ranks=comm),
    "gather": lambda x, comm: ORDERED.gather(x, ranks=comm),
    "exscan": lambda x, comm: ORDERED.exscan(x, ranks=comm),
    "send": lambda x, comm: ORDERED.send(x, 0, ranks=comm),
    "all_reduce": lambda x, comm: ORDERED.all_reduce(x, "max", ranks=comm),
}


def test_each_verb_with_a_rule_is_tested() -> None:
    assert {verb for verb, _ in TRANSPOSED} == CALLS.keys() | REFUSED.keys() | {"recv"}


@pytest.mark.parametrize("verb", CALLS)
def test_a_backward_runs_the_verb_of_the_rule_with_a_label(verb: str) -> None:
    def body(comm: Any) -> None:
        seen: list[tuple[str, str]] = []

        def running(call: TensorCall[Any], label: str) -> Any:
            seen.append((call.verb, label))
            return call.run(label)

        gradients = VerbGradients(BRIDGE, RETURNING.send_recv, running, WAY_OUT)
        call = CALLS[verb](np.arange(4.0), comm)
        gradients.check(call)
        answer = call.run("with gradient")
        result, received = answer if verb == "all_to_all_v" else (answer, None)
        gradient = gradients.gradient(gradients.record(call, "with gradient", received), Form(), np.ones_like(result))
        assert gradient.shape == (4,)
        rule = find_rule(verb, "mean" if verb == "all_reduce" else "sum")
        uneven = {"all_gather": ("all_gather", "all_gather_v")}
        assert seen[-1][0] in uneven.get(rule.verb, (rule.verb,))
        assert {label for _, label in seen} == {"of gradients, call 0"}

    run(2, body)


@pytest.mark.parametrize("verb", REFUSED)
def test_a_verb_without_a_backward_names_reason_and_remedy(verb: str) -> None:
    def body(comm: Any) -> None:
        gradients = VerbGradients(BRIDGE, RETURNING.send_recv, lambda call, label: None, WAY_OUT)
        with pytest.raises(UsageError, match=rf"{verb}, rank {comm.rank}: .*(call|only).*{WAY_OUT}"):
            gradients.check(REFUSED[verb](np.ones(2), comm))

    run(2, body)


def test_numbers_of_a_step_begin_at_zero_after_its_backward() -> None:
    """So a loop needs a bounded number of labels, and a backward of a backward has numbers of its own."""

    class Owner:
        pass

    numbers, one, other = CallNumbers(), Owner(), Owner()
    for _ in range(2):
        assert [numbers.take(one, "with gradient") for _ in range(3)] == [0, 1, 2]
        assert numbers.take(other, "with gradient") == 0
        numbers.begin_backward(one)
        numbers.begin_backward(other)
        assert numbers.take(one, "of gradients, call 2") == 3
