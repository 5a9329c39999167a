"""Gradients of ordered verbs: each is an ordered verb on the gradient of the result, and differentiates in turn.

The backward of a verb is the transposed verb (`commlib.autodiff.TRANSPOSED`): it gives the gradient of the sum of all
ranks' losses. Named operations keep Horovod's convention instead, which averages the gradients of gathers and
broadcasts.

A backward is collective like its verb. So a tensor requires a gradient on every rank or on none, and every rank uses
the result in its loss (a rank that has no use for it adds the result times zero). Ranks that differ raise
MismatchError: the calls of a forward with a gradient, and of a backward, carry labels. The label of a backward has the
number of its forward call, so that ranks that run backwards in different orders do not exchange their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from commlib.autodiff import find_rule, reversed_ranks
from commlib.communicator import Communicator
from commlib.errors import UsageError
from commlib.tensor_verbs.call import SAME, Bridge, ResultOrZeros, TensorCall
from commlib.tensor_verbs.ordered_verbs import OrderedVerbs

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

WITH_GRADIENT = "with gradient"
"""The label of a forward that autograd records."""
OF_GRADIENTS = "of gradients"
"""The start of the label of a backward."""
_NUMBERS = 1000  # each label takes memory

_NO_BACKWARD: Mapping[str, str] = MappingProxyType({
    "reduce": "it returns None on all ranks but the root, so no backward would run there: call all_reduce",
    "gather": "it returns None on all ranks but the root, so no backward would run there: call all_gather",
    "exscan": "it returns None on rank 0, so no backward would run there: call scan, and subtract the tensor",
    "send": "it returns nothing, so no backward would run on this rank: call send_recv",
    "recv": "it overwrites a tensor that requires a gradient: receive into another tensor",
})  # fmt: skip
"""The verbs without a backward, with the reason and the alternative."""


class InputForm(Protocol[T_co]):
    """The facts about an input that a backward needs, so that autograd need not keep the input.

    length: of dimension 0; None if it is not known before the call runs.
    """

    @property
    def length(self) -> int | None: ...

    def zeros(self) -> T_co:
        """Return zeros of the input's shape and dtype, on its device."""
        ...

    def rows(self) -> T_co:
        """Return the length of dimension 0 as an int64 tensor of one element."""
        ...


@dataclass(frozen=True, slots=True)
class RecordedVerb:
    """A verb that autograd has recorded: the data that a backward needs. The call itself may keep tensors alive.

    owner, number: see `CallNumbers`. received: for all_to_all_v, the number of rows from each rank.
    """

    verb: str
    comm: Communicator
    options: Mapping[str, Any]
    owner: Any
    number: int
    received: Any = None


class CallNumbers:
    """Numbers of the recorded calls of a communicator or a graph: equal on all ranks, and below 1000.

    They start at 0 with the first forward after a backward, so the steps of a training loop have the same numbers.
    """

    def __init__(self) -> None:
        self._next: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._after_backward: WeakSet[Any] = WeakSet()

    def take(self, owner: Any, label: str) -> int:
        """Return the number of the next recorded call. owner: its communicator, or the graph that it is a node of."""
        number = self._next.get(owner, 0)
        if owner in self._after_backward and not label.startswith(OF_GRADIENTS):
            self._after_backward.discard(owner)
            number = 0
        self._next[owner] = (number + 1) % _NUMBERS
        return number

    def begin_backward(self, owner: Any) -> None:
        """Let the next forward of `owner` start at 0."""
        self._after_backward.add(owner)

    def continue_forward(self, owner: Any) -> None:
        """Undo `begin_backward`, for the backwards that forward mode has run during a forward."""
        self._after_backward.discard(owner)


class VerbGradients(Generic[T]):
    """The gradients of the ordered verbs of one framework.

    send_recv: builds this verb. run: runs a call with a label, and lets autograd record it if it is to be
    differentiated. way_out: how to call a verb without a gradient, for errors.
    """

    def __init__(
        self,
        bridge: Bridge[T],
        send_recv: Callable[..., TensorCall[T]],
        run: Callable[[TensorCall[Any], str], Any],
        way_out: str,
    ) -> None:
        self._bridge, self._verbs, self._send_recv, self._run = bridge, OrderedVerbs(bridge), send_recv, run
        self._way_out = way_out
        self._numbers = CallNumbers()

    def check(self, call: TensorCall[Any]) -> None:
        """Raise UsageError if a call has no backward."""
        if isinstance(call.result, ResultOrZeros):
            return
        place = f"{call.comm.name}: {call.verb}, rank {call.comm.rank}"
        if call.verb in _NO_BACKWARD:
            raise UsageError(f"{place}: no gradient flows through: {_NO_BACKWARD[call.verb]}, or {self._way_out}")
        try:
            find_rule(call.verb, call.options().get("op", "sum"))
        except UsageError as error:
            raise UsageError(f"{place}: the tensor requires a gradient, but {error}: {self._way_out}") from error

    def refuse_async(self, call: TensorCall[Any]) -> UsageError:
        """Return the error for a call that is started with a tensor that requires a gradient."""
        return UsageError(
            f"{call.comm.name}: {call.verb}_async, rank {call.comm.rank}: the tensor requires a gradient, but the "
            "result would join the graph only when it is waited for, in an order that may differ among ranks: call "
            f"{call.verb}, or {self._way_out}"
        )

    def record(
        self, call: TensorCall[Any], label: str, received: Any = None, *, owner: Any | None = None
    ) -> RecordedVerb:
        """Return the data of a call, labelled `label`, that its backward needs. owner: by default its communicator."""
        owner = call.comm if owner is None else owner
        return RecordedVerb(call.verb, call.comm, call.options(), owner, self._numbers.take(owner, label), received)

    def continue_forward(self, owner: Any) -> None:
        """Go on with the numbers of a forward, after forward mode has run backwards during it."""
        self._numbers.continue_forward(owner)

    def gradient(self, recorded: RecordedVerb, form: InputForm[T], gradient: T) -> T:
        """Return the gradient of the input from the gradient of the result. It may lack the input's shape."""
        rule = find_rule(recorded.verb, recorded.options.get("op", "sum"))
        self._numbers.begin_backward(recorded.owner)
        call = _BACKWARD[recorded.verb](self, recorded, form, gradient)
        result: Any = self._run(call, _backward_label(recorded))
        if recorded.verb == "all_to_all_v":
            result = result[0]
        factor = rule.factor(recorded.comm.size)
        scaled: T = result if factor == 1 else result * factor
        return scaled

    def _all_reduce(self, recorded: RecordedVerb, form: InputForm[T], gradient: T) -> TensorCall[Any]:
        return self._verbs.all_reduce(gradient, **recorded.options, ranks=recorded.comm)

    def _reduce_scatter(self, recorded: RecordedVerb, form: InputForm[T], gradient: T) -> TensorCall[Any]:
        even = form.length is not None and form.length % recorded.comm.size == 0
        gather = self._verbs.all_gather if even else self._verbs.all_gather_v
        return gather(gradient, ranks=recorded.comm)

    def _reduce_scatter_v(self, recorded: RecordedVerb, form: InputForm[T], gradient: T) -> TensorCall[Any]:
        return self._verbs.all_gather_v(gradient, ranks=recorded.comm)

    def _all_gather(self, recorded: RecordedVerb, form: InputForm[T], gradient: T) -> TensorCall[Any]:
        return self._verbs.reduce_scatter(gradient, ranks=recorded.comm)

    def _all_gather_v(self, recorded: RecordedVerb, form: InputForm[T], gradient: T) -> TensorCall[Any]:
        counts = self._run(self._verbs.all_gather(form.rows(), ranks=recorded.comm), _backward_label(recorded))
        return self._verbs.reduce_scatter_v(gradient, counts, ranks=recorded.comm)

    def _broadcast(self, recorded: RecordedVerb, form: InputForm[T], gradient: T) -> TensorCall[Any]:
        return self._to_root("reduce", recorded, form, gradient)

    def _scatter(self, recorded: RecordedVerb, form: InputForm[T], gradient: T) -> TensorCall[Any]:
        return self._to_root("gather", recorded, form, gradient)

    def _to_root(self, verb: str, recorded: RecordedVerb, form: InputForm[T], gradient: T) -> TensorCall[Any]:
        """Return a reduce or gather that gives all ranks a gradient, off the root zeros. It differentiates."""
        root = recorded.options["root"]
        result = ResultOrZeros(form.zeros)
        return TensorCall(
            self._bridge,
            recorded.comm,
            verb,
            lambda run, x: run(x, root=root),
            (gradient,),
            result,
            lambda: {"root": root},
        )

    def _reduce(self, recorded: RecordedVerb, form: InputForm[T], gradient: T) -> TensorCall[Any]:
        return self._verbs.broadcast(gradient, recorded.options["root"], ranks=recorded.comm)

    def _gather(self, recorded: RecordedVerb, form: InputForm[T], gradient: T) -> TensorCall[Any]:
        return self._verbs.scatter(gradient, recorded.options["root"], ranks=recorded.comm)

    def _all_to_all(self, recorded: RecordedVerb, form: InputForm[T], gradient: T) -> TensorCall[Any]:
        return self._verbs.all_to_all(gradient, **recorded.options, ranks=recorded.comm)

    def _all_to_all_v(self, recorded: RecordedVerb, form: InputForm[T], gradient: T) -> TensorCall[Any]:
        splits, received = recorded.options["splits"], recorded.received
        return self._verbs.all_to_all_v(gradient, received, takes=splits, ranks=recorded.comm)

    def _send_back(self, recorded: RecordedVerb, form: InputForm[T], gradient: T) -> TensorCall[Any]:
        peer, source, tag = (recorded.options[name] for name in ("peer", "source", "tag"))
        return self._send_recv(gradient, source, form.zeros(), peer, tag, ranks=recorded.comm)

    def _scan(self, recorded: RecordedVerb, form: InputForm[T], gradient: T) -> TensorCall[Any]:
        comm = recorded.comm
        if recorded.options.get("reverse"):
            return self._verbs.scan(gradient, ranks=comm)
        return TensorCall(
            self._bridge,
            comm,
            "scan",
            lambda _, x: reversed_ranks(comm).scan(x),
            (gradient,),
            SAME,
            lambda: {"op": "sum", "reverse": True},
        )


def _backward_label(recorded: RecordedVerb) -> str:
    return f"{OF_GRADIENTS}, call {recorded.number}"


_BACKWARD: Mapping[str, Callable[..., TensorCall[Any]]] = MappingProxyType({
    "all_reduce": VerbGradients._all_reduce,
    "reduce_scatter": VerbGradients._reduce_scatter,
    "reduce_scatter_v": VerbGradients._reduce_scatter_v,
    "scan": VerbGradients._scan,
    "broadcast": VerbGradients._broadcast,
    "all_gather": VerbGradients._all_gather,
    "all_gather_v": VerbGradients._all_gather_v,
    "scatter": VerbGradients._scatter,
    "all_to_all": VerbGradients._all_to_all,
    "all_to_all_v": VerbGradients._all_to_all_v,
    "send_recv": VerbGradients._send_back,
    "reduce": VerbGradients._reduce,
    "gather": VerbGradients._gather,
})  # fmt: skip
"""The backward of each verb; reduce and gather are themselves backwards (see `_to_root`)."""
