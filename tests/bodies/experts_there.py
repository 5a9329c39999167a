"""Bodies of tests: rows of experts on a device, against the host's exchange of the same rows, bit for bit.

put: returns a device's array with the values of one of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import commlib
from commlib import Communicator
from commlib.compress.registry import codec_of
from commlib.devices.array import DeviceArray
from commlib.devices.arrays import as_contiguous
from commlib.devices.waiting import wait_for
from commlib.dtypes import NUMPY, Array
from commlib.errors import MismatchError, UsageError
from commlib.expert import Experts
from commlib.expert.chunked_dispatch import ChunkedDispatch, split_tokens
from commlib.expert.dispatcher import Dispatcher
from commlib.expert.dispatchers import dispatcher_over
from commlib.expert.expert_ranks import ExpertRanks
from commlib.expert.mixture import Mixture
from commlib.expert.placement import ExpertPlacement
from commlib.expert.scaled_gradients import scale_gradients
from commlib.expert.shared_memory_dispatcher import SharedMemoryDispatcher
from commlib.sharding.axis import ParallelAxis
from tests.cuda.hard import assert_same_bits
from tests.unit.expert.test_exchange import assign, expected_rows

Put = Callable[[Array], Any]

EXPERTS = 6


def fetch(x: Any) -> Array:
    """Return the values of an array of a device."""
    block = x.device.staging(x.nbytes)
    x.device.copy(block, x)
    wait_for(x.device.current().record(), lambda: None)
    found: Array = block.view(x.dtype).reshape(x.shape).copy()
    return found


class Layer:
    """A layer with tokens on the host, whose exchange is the oracle, and the same on a device."""

    def __init__(self, name: str, here: Dispatcher, there: Dispatcher, put: Put) -> None:
        self.name, self._here, self._there = name, here, there
        self._put: Put = lambda values: as_contiguous(put(values), name)
        self._calls: list[Any] = []

    def forward(self, chosen: Array, width: int, dtype: str, seed: int) -> None:
        """Send tokens to experts and back. chosen: the table of this rank's, bool [tokens, experts]."""
        draw, kind, assigned = np.random.default_rng(seed), NUMPY[dtype], assign(chosen)
        x = draw.standard_normal((len(chosen), width)).astype(kind)
        gates = draw.random(len(assigned.tokens)).astype(np.float32)
        gates[::3] = 1
        passage, rows, came, counts = self._here.dispatch(self.name, assigned, x, gates)
        there, there_rows, there_came, there_counts = self._there.dispatch(self.name, assigned, self._put(x), gates)
        assert there_counts.tolist() == counts.tolist()
        assert_same_bits(fetch(there_rows), rows)
        assert_same_bits(fetch(there_came), came)
        made = (np.float32(0.7) * rows.astype(np.float32)).astype(kind)  # by the experts
        there_made = self._put(made)
        sums = self._here.combine(self.name, passage, made, came)
        assert_same_bits(fetch(self._there.combine(self.name, there, there_made, there_came)), sums)
        self._calls.append((passage, made, came.copy(), there, there_made, there_came, draw))

    def backward(self) -> None:
        """Send gradients of the last forward back."""
        passage, made, came, there, there_made, there_came, draw = self._calls.pop()
        tokens = int(there.starts.shape[0]) - 1
        gradient = draw.standard_normal((tokens, made.shape[1])).astype(made.dtype)
        of_made = self._here.combine_back(self.name, passage, gradient).copy()
        there_of_made = self._there.combine_back(self.name, there, self._put(gradient))
        assert_same_bits(fetch(there_of_made), of_made)
        of_gates = scale_gradients(of_made, made, came)
        there_of_gates = scale_gradients(there_of_made, there_made, there_came)
        assert_same_bits(fetch(there_of_made), of_made)
        assert_same_bits(fetch(there_of_gates), of_gates)
        of_x, numbers = self._here.dispatch_back(self.name, passage, of_made, of_gates)
        there_of_x, there_numbers = self._there.dispatch_back(self.name, there, there_of_made, there_of_gates)
        assert_same_bits(fetch(there_of_x), of_x)
        assert_same_bits(fetch(there_numbers), numbers)


def oracle() -> Communicator:
    """Return a communicator of all ranks, which share the host's memory there."""
    found = commlib.world().split(0, name="oracle")
    assert found is not None
    return found


def layers(comm: Communicator, put: Put, names: Sequence[str], placement: ExpertPlacement | None = None) -> list[Layer]:
    """Return layers that share what is between the ranks. Collective."""
    where = ExpertPlacement.even(EXPERTS, comm.size) if placement is None else placement
    here, there = SharedMemoryDispatcher(oracle(), where), dispatcher_over(ParallelAxis(comm), where)
    return [Layer(name, here, there, put) for name in names]


def table(comm: Communicator, rows: Sequence[int], top_k: int, seed: int = 0) -> Array:
    """Return experts for so many tokens of this rank, `top_k` for each."""
    draw = np.random.default_rng([seed, comm.rank])
    found = np.zeros((rows[comm.rank % len(rows)], EXPERTS), bool)
    for token in found:
        token[draw.permutation(EXPERTS)[:top_k]] = True
    return found


def there_and_back(comm: Communicator, put: Put, dtype: str) -> None:
    """Of several widths, and of one and of two experts for each token."""
    (layer,) = layers(comm, put, ["one"])
    for width, top_k in ((1, 1), (33, 2), (64, 2), (72, 3)):
        layer.forward(table(comm, [7, 12, 1], top_k), width, dtype, comm.rank)
        layer.backward()


def few_tokens(comm: Communicator, put: Put) -> None:
    """Ranks without tokens, and none at all."""
    (layer,) = layers(comm, put, ["one"])
    for rows in ([0, 9], [9, 0], [0]):
        layer.forward(table(comm, rows, 2), 40, "float32", 1)
        layer.backward()


def one_expert(comm: Communicator, put: Put) -> None:
    """All tokens go to one expert, the first or the last one."""
    (layer,) = layers(comm, put, ["one"])
    for expert in (0, EXPERTS - 1):
        chosen = np.zeros((10 + comm.rank, EXPERTS), bool)
        chosen[:, expert] = True
        layer.forward(chosen, 16, "bfloat16", comm.rank)
        layer.backward()


def moved_experts(comm: Communicator, put: Put) -> None:
    """Experts that are not in the order of their ranks."""
    owners = tuple((5 * expert + 1) % comm.size for expert in range(EXPERTS))
    placement = ExpertPlacement(
        owners if set(owners) == set(range(comm.size)) else tuple(np.arange(6) % comm.size), comm.size
    )
    (layer,) = layers(comm, put, ["one"], placement)
    layer.forward(table(comm, [20, 3], 2), 24, "float16", comm.rank)
    layer.backward()


def growing(comm: Communicator, put: Put) -> None:
    """More tokens, and wider ones, each time; then few again. They become more than a slot between devices holds."""
    (layer,) = layers(comm, put, ["one"])
    for step, rows in enumerate((2, 50, 400, 3)):
        layer.forward(table(comm, [rows, rows // 2], 2, step), 64 * (step + 1), "float32", comm.rank)
        layer.backward()


def two_layers(comm: Communicator, put: Put) -> None:
    """Two layers, twice each, backward in the opposite order."""
    both = layers(comm, put, ["first", "second"])
    for step in range(4):
        both[step % 2].forward(table(comm, [5, 8], 2, step), 20, "float32", comm.rank + step)
    for step in reversed(range(4)):
        both[step % 2].backward()


def in_parts(comm: Communicator, put: Put) -> None:
    """Parts of the tokens travel while experts compute others: forward and backward as in a layer with chunks."""
    options, width = Experts(EXPERTS, top_k=2), 32
    x = np.random.default_rng(comm.rank).standard_normal((30 + comm.rank, width)).astype(np.float32)
    logits = np.random.default_rng([1, comm.rank]).standard_normal((len(x), EXPERTS)).astype(np.float32)

    def run(mixture: Mixture, put: Callable[[Array], Any], scale: Callable[[Any], None]) -> list[Any]:
        routing = mixture.route(logits, training=False)
        flow = ChunkedDispatch(mixture, split_tokens(routing, 4), put(x), routing.gates)
        numbers, kept, found = range(4), [], list[Any]()
        flow.dispatch(0)
        for part in numbers:
            if part + 1 < 4:
                flow.dispatch(part + 1)
            rows, gates, _ = flow.dispatched(part)
            made = rows.copy()
            scale(made)
            del rows  # memory that is taken again while experts may still read it
            kept.append((made, gates))
            flow.combine(part, made, gates)
        found += [flow.combined(part) for part in numbers]
        for part in reversed(numbers):
            flow.combine_back(part, put(x[flow.parts[part].first : flow.parts[part].last]))
        for part in reversed(numbers):
            came = flow.wait_combine_back(part).copy()
            of_gates = scale_gradients(came, *kept[part])
            scale(came)
            flow.dispatch_back(part, came, of_gates)
        for part in numbers:
            found += flow.wait_dispatch_back(part)
        return found

    here, there = (Mixture("parts", options, ExpertRanks.of(one, EXPERTS)) for one in (oracle(), comm))

    def half(array: DeviceArray) -> None:
        array.device.kernels.scale(array.reshape(-1), 0.7)

    def half_here(array: Array) -> None:
        array *= np.float32(0.7)

    for _ in range(2):
        expected = run(here, lambda values: values, half_here)
        found = run(there, lambda values: as_contiguous(put(values), "parts"), half)
        for got, wanted in zip(found, expected, strict=True):
            assert_same_bits(fetch(got), wanted)


def other_meanings(comm: Communicator, put: Put) -> None:
    """Ranks that mean different layers, dtypes, steps or places: all raise, and say which. Then they go on."""
    exchange = dispatcher_over(ParallelAxis(comm), ExpertPlacement.even(EXPERTS, comm.size))
    x, gates = np.ones((3, 8), np.float32), np.ones(3 * EXPERTS, np.float32)
    assigned, odd = assign(np.ones((3, EXPERTS), bool)), comm.rank == 1
    there = as_contiguous(put(x), "x")
    with pytest.raises(MismatchError, match=r"rows on the host.*rank 1|rank 1.*rows on the host"):
        exchange.dispatch("zeroth", assigned, x if odd else there, gates)
    passage, rows, came, _ = exchange.dispatch("first", assigned, there, gates)
    with pytest.raises(MismatchError, match="layer of rank 1"):
        exchange.dispatch(f"layer of rank {int(odd)}", assigned, there, gates)
    with pytest.raises(MismatchError, match="float16"):
        exchange.dispatch("second", assigned, as_contiguous(put(x.astype(np.float16)), "x") if odd else there, gates)
    with pytest.raises(MismatchError, match="combine, backward"):
        exchange.combine_back("first", passage, there) if odd else exchange.combine("first", passage, rows, came)
    np.testing.assert_array_equal(fetch(exchange.combine("first", passage, rows, came)), EXPERTS * x)


def rows_of_the_host(comm: Communicator, put: Put) -> None:
    """Experts that fetch their rows are told."""
    exchange = dispatcher_over(ParallelAxis(comm), ExpertPlacement.even(EXPERTS, comm.size))
    x, gates = np.ones((2, 8), np.float32), np.ones(2 * EXPERTS, np.float32)
    passage, rows, came, _ = exchange.dispatch(
        "one", assign(np.ones((2, EXPERTS), bool)), as_contiguous(put(x), "x"), gates
    )
    with pytest.raises(UsageError, match=r"one: float32\[\d+, 8\] is on the host"):
        exchange.combine("one", passage, fetch(rows), came)
    np.testing.assert_array_equal(fetch(exchange.combine("one", passage, rows, came)), EXPERTS * x)


def encoded(comm: Communicator, put: Put) -> None:
    """Rows that travel encoded lose what the codec loses, a rank's own ones nothing; numbers travel as they are.

    Between ranks that share memory rows do, too.
    """
    placement, width = ExpertPlacement.even(EXPERTS, comm.size), 48
    for codec, most in (("bf16", 2**-8), ("fp8", 2**-3)):
        exchange = dispatcher_over(ParallelAxis(comm), placement, codec_of(codec))
        loss = 0 if comm.group.shares_memory or comm.size == 1 else most
        chosen = [np.random.default_rng(rank).random((9 * (rank + 1), EXPERTS)) < 0.4 for rank in range(comm.size)]
        xs = [np.random.default_rng([2, rank]).standard_normal((len(each), width)) for rank, each in enumerate(chosen)]
        x = xs[comm.rank].astype(np.float32)
        gates = np.arange(1, 1 + chosen[comm.rank].sum(), dtype=np.float32)
        passage, rows, came, counts = exchange.dispatch(
            "one", assign(chosen[comm.rank]), as_contiguous(put(x), "x"), gates
        )
        expected = expected_rows(chosen, [each.astype(np.float32) for each in xs], placement, comm.rank, None)
        difference = np.abs(fetch(rows) - expected)
        assert counts.sum() == len(expected)
        assert difference.max(initial=0) <= 5 * loss
        assert not loss or difference.max(initial=0) > 0
        exact = [np.repeat(rank == comm.rank, each[:, e].sum()) for e in placement.of_rank(comm.rank)
                 for rank, each in enumerate(chosen)]  # fmt: skip
        assert not difference[np.concatenate(exact)].any()
        sums, numbers = exchange.dispatch_back("one", passage, rows, came)
        assert_same_bits(fetch(numbers), gates)
        np.testing.assert_allclose(fetch(sums), x * chosen[comm.rank].sum(1)[:, None], atol=1e-5 + 60 * loss, rtol=0)


BODIES = [few_tokens, one_expert, moved_experts, growing, two_layers, in_parts, rows_of_the_host, encoded]
