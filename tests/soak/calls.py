"""From a step to a call on this rank: its arrays, and the check of its result."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from commlib import Communicator, Plan, Work
from commlib.dtypes import NUMPY
from commlib.literals import AlgorithmName, Op
from tests.oracles.oracle import assert_same, combined, values
from tests.soak.script import ROOTED, SYMMETRIC, Step


@dataclass(frozen=True, slots=True)
class Call:
    """`run` makes the call and returns its result; `start`, if there is one, returns its work instead."""

    run: Callable[[], Any]
    check: Callable[[Any], None]
    start: Callable[[], Work] | None = None
    only_start: bool = False  # `run` would wait for this rank's next call


@dataclass(slots=True)
class Seat:
    """One rank's place in one team: its communicator, and its lasting arrays and plans."""

    comm: Communicator
    slots: dict[int, Any] = field(default_factory=dict)
    plans: dict[tuple[int, int, str, str, str], Plan] = field(default_factory=dict)  # of slot, length, ... and out

    @property
    def ordinary_bytes(self) -> int:
        """The size of its ordinary slots, and of the results that plans own."""
        slots = sum(int(array.nbytes) for slot, array in self.slots.items() if slot not in SYMMETRIC)
        owned = sum(length * self.slots[slot].itemsize for slot, length, *_, out in self.plans if out == "new")
        return slots + int(owned)

    @property
    def symmetric_bytes(self) -> int:
        """The size of its symmetric slots, on all ranks together."""
        return int(self.comm.size) * sum(int(array.nbytes) for slot, array in self.slots.items() if slot in SYMMETRIC)


def calls(step: Step, seat: Seat) -> list[Call]:
    """Return this rank's calls, in order."""
    return MAKERS[step.verb](step, seat)


# Data and arrays


def data(step: Step, rank: int, shape: tuple[int, ...] | None = None) -> Any:
    """Return the input of one rank of the team: whole numbers, so that results are exact."""
    return values(step.kind.dtype, step.kind.shape if shape is None else shape, step.seed + rank)


def inputs(step: Step) -> list[Any]:
    return [data(step, rank) for rank in range(len(step.team.members))]


def blank(step: Step, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return a new array, possibly with gaps."""
    if step.strided and shape:
        return np.ones((*shape, 2), dtype)[..., 0]
    return np.ones(shape, dtype)


def argument(step: Step, seat: Seat, x: Any) -> Any:
    """Return a copy of `x` in the memory that the step requests."""
    if step.slot is None:
        array = blank(step, x.shape, x.dtype)
    else:
        whole = seat.slots[step.slot]
        array = whole if whole.shape == step.kind.shape else whole[: step.kind.shape[0]]
    array[...] = x
    return array


def outcome(step: Step, seat: Seat, x: Any, shape: tuple[int, ...]) -> Any:
    """Return the `out` argument for a result of this shape."""
    if step.kind.out == "in place":
        return x
    if step.kind.out == "new":
        return None
    if step.slot is not None and shape == step.kind.shape:
        return seat.slots[step.slot][shape[0] : 2 * shape[0]]
    return blank(step, shape, x.dtype)


def call(
    step: Step, seat: Seat, args: tuple[Any, ...], options: dict[str, Any], check: Callable[[Any], None]
) -> list[Call]:
    """Return one call of the step's verb. Its result must be `out`, if there was one."""
    if step.verb in ROOTED and "root" not in options:
        options["root"] = step.kind.root
    out = options.get("out")

    def whole_check(result: Any) -> None:
        assert out is None or result is out, "the result is not the out that was given"
        check(result)

    blocking, starting = getattr(seat.comm, step.verb), getattr(seat.comm, f"{step.verb}_async")
    return [Call(lambda: blocking(*args, **options), whole_check, lambda: starting(*args, **options))]


def on_arrays(step: Step, seat: Seat, expect: Callable[[], Any], *, out_at_root: bool = False) -> list[Call]:
    """Return a call of a verb with x, out and algorithm whose result is `expect()` (None: no result)."""
    own = data(step, seat.comm.rank)
    x = argument(step, seat, own)
    options: dict[str, Any] = {"algorithm": step.kind.algorithm}
    if step.kind.op:
        options["op"] = step.kind.op
    if not out_at_root or seat.comm.rank == step.kind.root:
        options["out"] = outcome(step, seat, x, RESULT_SHAPES[step.verb](step, seat.comm.rank))

    def check(result: Any) -> None:
        expected = expect()
        if expected is None:
            assert result is None, "a result where none was expected"
        else:
            assert_same(result, expected)
        if options.get("out") is not x:
            assert_same(x, own)  # the input is unchanged

    return call(step, seat, (x,), options, check)


def _rows_of(step: Step, rank: int) -> tuple[int, ...]:
    part = len(np.array_split(np.empty(step.kind.shape[0], np.bool_), len(step.team.members))[rank])
    return (part, *step.kind.shape[1:])


def _all_rows(step: Step, rank: int) -> tuple[int, ...]:
    size = len(step.team.members)
    return (size * step.kind.shape[0], *step.kind.shape[1:]) if step.kind.shape else (size,)


RESULT_SHAPES: dict[str, Callable[[Step, int], tuple[int, ...]]] = {
    "all_reduce": lambda step, rank: step.kind.shape,
    "reduce": lambda step, rank: step.kind.shape,
    "all_to_all": lambda step, rank: step.kind.shape,
    "reduce_scatter": _rows_of,
    "all_gather": _all_rows,
    "gather": _all_rows,
}

# The verbs


def all_reduce(step: Step, seat: Seat) -> list[Call]:
    return on_arrays(step, seat, lambda: combined(inputs(step), step.kind.op))


def reduce(step: Step, seat: Seat) -> list[Call]:
    at_root = seat.comm.rank == step.kind.root
    return on_arrays(step, seat, lambda: combined(inputs(step), step.kind.op) if at_root else None, out_at_root=True)


def reduce_scatter(step: Step, seat: Seat) -> list[Call]:
    size, rank = seat.comm.size, seat.comm.rank
    return on_arrays(step, seat, lambda: np.array_split(combined(inputs(step), step.kind.op), size)[rank])


def _gathered(step: Step) -> Any:
    return np.concatenate([np.atleast_1d(x) for x in inputs(step)])


def all_gather(step: Step, seat: Seat) -> list[Call]:
    return on_arrays(step, seat, lambda: _gathered(step))


def gather(step: Step, seat: Seat) -> list[Call]:
    at_root = seat.comm.rank == step.kind.root
    return on_arrays(step, seat, lambda: _gathered(step) if at_root else None, out_at_root=True)


def all_to_all(step: Step, seat: Seat) -> list[Call]:
    size, rank = seat.comm.size, seat.comm.rank
    return on_arrays(step, seat, lambda: np.concatenate([np.split(x, size)[rank] for x in inputs(step)]))


def scatter(step: Step, seat: Seat) -> list[Call]:
    size, rank = seat.comm.size, seat.comm.rank
    whole = data(step, step.kind.root)
    x = argument(step, seat, whole) if rank == step.kind.root else None
    part = np.split(whole, size)[rank]
    out = blank(step, part.shape, part.dtype) if step.kind.out == "given" else None

    def check(result: Any) -> None:
        assert_same(result, part)
        if x is not None:
            assert_same(x, whole)

    return call(step, seat, (x,), {"out": out, "algorithm": step.kind.algorithm}, check)


def broadcast(step: Step, seat: Seat) -> list[Call]:
    x = argument(step, seat, data(step, seat.comm.rank))

    def check(result: Any) -> None:
        assert result is x, "broadcast returned another array"
        assert_same(x, data(step, step.kind.root))

    return call(step, seat, (x,), {"algorithm": step.kind.algorithm}, check)


def _cut(step: Step, rank: int, total: int, parts: int) -> list[int]:
    """Return how many of `total` rows go into each part, drawn for one rank."""
    cuts = sorted(random.Random(step.seed + rank).choices(range(total + 1), k=parts - 1))
    return [stop - start for start, stop in zip([0, *cuts], [*cuts, total], strict=True)]


def reduce_scatter_v(step: Step, seat: Seat) -> list[Call]:
    size, rank, own = seat.comm.size, seat.comm.rank, data(step, seat.comm.rank)
    counts = _cut(step, 0, step.kind.shape[0], size)
    x = argument(step, seat, own)

    def check(result: Any) -> None:
        assert_same(result, np.split(combined(inputs(step), step.kind.op), np.cumsum(counts)[:-1])[rank])
        assert_same(x, own)

    return call(step, seat, (x, counts, step.kind.op), {}, check)


def scan(step: Step, seat: Seat) -> list[Call]:
    return _prefix(step, seat, seat.comm.rank + 1)


def exscan(step: Step, seat: Seat) -> list[Call]:
    return _prefix(step, seat, seat.comm.rank)


def _prefix(step: Step, seat: Seat, ranks: int) -> list[Call]:
    """Return a call whose result is the combination of the first ranks; zero ranks have none."""
    op = "sum" if step.kind.op == "mean" else step.kind.op
    own = data(step, seat.comm.rank)
    x = argument(step, seat, own)

    def check(result: Any) -> None:
        if ranks:
            assert_same(result, combined(inputs(step)[:ranks], op))
        else:
            assert result is None, "a result where none was expected"
        assert_same(x, own)

    return call(step, seat, (x, op), {}, check)


def all_gather_v(step: Step, seat: Seat) -> list[Call]:
    size, rank = seat.comm.size, seat.comm.rank
    lengths = _cut(step, 0, step.kind.shape[0], size)
    xs = [data(step, peer, (length, *step.kind.shape[1:])) for peer, length in enumerate(lengths)]
    x = argument(step, seat, xs[rank])

    def check(result: Any) -> None:
        assert_same(result, np.concatenate(xs))
        assert_same(x, xs[rank])

    return call(step, seat, (x,), {}, check)


def all_to_all_v(step: Step, seat: Seat) -> list[Call]:
    size, rank = seat.comm.size, seat.comm.rank
    splits = [_cut(step, peer, step.kind.shape[0], size) for peer in range(size)]
    own = data(step, rank)
    x = argument(step, seat, own)

    def check(result: Any) -> None:
        received, lengths = result
        parts = [np.split(sent, np.cumsum(splits[peer])[:-1])[rank] for peer, sent in enumerate(inputs(step))]
        assert_same(received, np.concatenate(parts))
        assert_same(lengths, np.array([len(part) for part in parts], np.int64))
        assert_same(x, own)

    return call(step, seat, (x, splits[rank]), {}, check)


def plan(step: Step, seat: Seat) -> list[Call]:
    assert step.slot is not None
    own = data(step, seat.comm.rank)
    x = argument(step, seat, own)
    key = step.slot, step.kind.shape[0], step.kind.op, step.kind.algorithm, step.kind.out
    if key not in seat.plans:
        out = outcome(step, seat, x, step.kind.shape)
        op, algorithm = cast(Op, step.kind.op), cast(AlgorithmName, step.kind.algorithm)
        seat.plans[key] = seat.comm.plan_all_reduce(x, op, out=out, algorithm=algorithm)
    plan_of_slot = seat.plans[key]

    def check(result: Any) -> None:
        assert_same(result, combined(inputs(step), step.kind.op))
        if step.kind.out != "in place":
            assert_same(x, own)

    return [Call(plan_of_slot, check, plan_of_slot.start)]


def message(step: Step, seat: Seat) -> list[Call]:
    """Rank `root` sends, rank `peer` receives; they may be the same."""
    comm, sent = seat.comm, data(step, step.kind.root)
    calls = []
    if comm.rank == step.peer:
        into = blank(step, sent.shape, sent.dtype)

        def check_received(result: Any) -> None:
            assert result is into, "recv returned another array"
            assert_same(into, sent)

        receive = (into, step.kind.root, step.tag)
        alone = step.kind.root == step.peer
        calls.append(Call(lambda: comm.recv(*receive), check_received, lambda: comm.recv_async(*receive), alone))
    if comm.rank == step.kind.root:
        x = argument(step, seat, sent)

        def check_sent(result: Any) -> None:
            assert result is None, "send returned something"
            assert_same(x, sent)

        send = (x, step.peer, step.tag)
        calls.append(Call(lambda: comm.send(*send), check_sent, lambda: comm.send_async(*send)))
    return calls


def send_recv(step: Step, seat: Seat) -> list[Call]:
    """Pass on around a ring."""
    size, rank = seat.comm.size, seat.comm.rank
    target, source = (rank + step.peer) % size, (rank - step.peer) % size
    x, into = argument(step, seat, data(step, rank)), blank(step, step.kind.shape, NUMPY[step.kind.dtype])

    def check(result: Any) -> None:
        assert result is into, "send_recv returned another array"
        assert_same(into, data(step, source))
        assert_same(x, data(step, rank))

    return call(step, seat, (x, target, into, source, step.tag), {}, check)


def barrier(step: Step, seat: Seat) -> list[Call]:
    def check(result: Any) -> None:
        assert result is None, "barrier returned something"

    return call(step, seat, (), {}, check)


def _thing(step: Step, rank: int) -> Any:
    numbers = random.Random(step.seed + rank)
    return {"rank": rank, "text": "x" * numbers.randrange(2000), "list": [numbers.random() for _ in range(rank)]}


def broadcast_object(step: Step, seat: Seat) -> list[Call]:
    def check(result: Any) -> None:
        assert result == _thing(step, step.kind.root), "another object was received"

    return call(step, seat, (_thing(step, seat.comm.rank),), {}, check)


def all_gather_object(step: Step, seat: Seat) -> list[Call]:
    def check(result: Any) -> None:
        assert result == [_thing(step, rank) for rank in range(seat.comm.size)], "other objects were received"

    return call(step, seat, (_thing(step, seat.comm.rank),), {}, check)


def allocate(step: Step, seat: Seat) -> list[Call]:
    """Put a new array into a slot; the old one and its plans are dropped."""
    assert step.slot is not None
    slot, dtype = step.slot, NUMPY[step.kind.dtype]

    def run() -> Any:
        seat.slots.pop(slot, None)
        seat.plans = {key: plan for key, plan in seat.plans.items() if key[0] != slot}
        make = seat.comm.empty if slot in SYMMETRIC else np.zeros
        seat.slots[slot] = array = make(step.kind.shape, dtype)
        return array

    return [Call(run, lambda array: assert_same(array, np.zeros(step.kind.shape, dtype)))]


def split(step: Step, seat: Seat) -> list[Call]:
    """Make groups, use them, and close them."""
    comm = seat.comm
    color = comm.rank % (step.peer + 1)
    members = [rank for rank in range(comm.size) if rank % (step.peer + 1) == color][::-1]

    def run() -> Any:
        group = comm.split(color, key=-comm.rank)
        assert group is not None and (group.size, group.rank) == (len(members), members.index(comm.rank))
        x = group.empty(3000, "int32")
        x[:] = comm.rank
        group.all_reduce(x, out=x)
        gathered = group.all_gather_async(np.array([comm.rank])).wait()
        total = int(x[0]), int(x[-1])
        del x
        group.close()
        return total, gathered.tolist()

    def check(result: Any) -> None:
        assert result == ((sum(members), sum(members)), members), result

    return [Call(run, check)]


MAKERS: dict[str, Callable[[Step, Seat], list[Call]]] = {
    maker.__name__: maker
    for maker in (
        all_reduce, plan, reduce_scatter, reduce_scatter_v, scan, exscan, reduce, broadcast, all_gather, all_gather_v,
        gather, scatter, all_to_all, all_to_all_v, message, send_recv, barrier, broadcast_object, all_gather_object,
        allocate, split,
    )
}  # fmt: skip
