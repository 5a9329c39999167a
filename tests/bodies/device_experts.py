"""Bodies of tests: experts' rows on a device, against the host's exchange of the same rows, bit for bit.

put: returns a device's array with the values of a host array.
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
    values: Array = block.view(x.dtype).reshape(x.shape).copy()
    return values


class Layer:
    """A layer with tokens on the host, whose exchange is the oracle, and the same on a device."""

    def __init__(self, name: str, host: Dispatcher, device: Dispatcher, put: Put) -> None:
        self.name, self._host, self._device = name, host, device
        self._put: Put = lambda values: as_contiguous(put(values), name)
        self._calls: list[Any] = []

    def forward(self, chosen: Array, width: int, dtype: str, seed: int) -> None:
        """Send tokens to experts and back. chosen: the table of this rank's, bool [tokens, experts]."""
        draw, kind, assigned = np.random.default_rng(seed), NUMPY[dtype], assign(chosen)
        x = draw.standard_normal((len(chosen), width)).astype(kind)
        gates = draw.random(len(assigned.tokens)).astype(np.float32)
        gates[::3] = 1
        plan, rows, received_gates, counts = self._host.dispatch(self.name, assigned, x, gates)
        device_plan, device_rows, device_gates, device_counts = self._device.dispatch(
            self.name, assigned, self._put(x), gates
        )
        assert device_counts.tolist() == counts.tolist()
        assert_same_bits(fetch(device_rows), rows)
        assert_same_bits(fetch(device_gates), received_gates)
        outputs = (np.float32(0.7) * rows.astype(np.float32)).astype(kind)  # by the experts
        device_outputs = self._put(outputs)
        sums = self._host.combine(self.name, plan, outputs, received_gates)
        assert_same_bits(fetch(self._device.combine(self.name, device_plan, device_outputs, device_gates)), sums)
        self._calls.append((plan, outputs, received_gates.copy(), device_plan, device_outputs, device_gates, draw))

    def backward(self) -> None:
        """Send gradients of the last forward back."""
        plan, outputs, received_gates, device_plan, device_outputs, device_gates, draw = self._calls.pop()
        tokens = int(device_plan.starts.shape[0]) - 1
        gradient = draw.standard_normal((tokens, outputs.shape[1])).astype(outputs.dtype)
        output_gradients = self._host.combine_back(self.name, plan, gradient).copy()
        device_output_gradients = self._device.combine_back(self.name, device_plan, self._put(gradient))
        assert_same_bits(fetch(device_output_gradients), output_gradients)
        gate_gradients = scale_gradients(output_gradients, outputs, received_gates)
        device_gate_gradients = scale_gradients(device_output_gradients, device_outputs, device_gates)
        assert_same_bits(fetch(device_output_gradients), output_gradients)
        assert_same_bits(fetch(device_gate_gradients), gate_gradients)
        x_gradients, numbers = self._host.dispatch_back(self.name, plan, output_gradients, gate_gradients)
        device_x_gradients, device_numbers = self._device.dispatch_back(
            self.name, device_plan, device_output_gradients, device_gate_gradients
        )
        assert_same_bits(fetch(device_x_gradients), x_gradients)
        assert_same_bits(fetch(device_numbers), numbers)


def oracle() -> Communicator:
    """Return a communicator of all ranks, which share host memory in it."""
    group = commlib.world().split(0, name="oracle")
    assert group is not None
    return group


def layers(comm: Communicator, put: Put, names: Sequence[str], placement: ExpertPlacement | None = None) -> list[Layer]:
    """Return layers that share the connection between the ranks. Collective."""
    experts_of_ranks = ExpertPlacement.even(EXPERTS, comm.size) if placement is None else placement
    on_host, on_device = (
        SharedMemoryDispatcher(oracle(), experts_of_ranks),
        dispatcher_over(ParallelAxis(comm), experts_of_ranks),
    )
    return [Layer(name, on_host, on_device, put) for name in names]


def table(comm: Communicator, rows: Sequence[int], top_k: int, seed: int = 0) -> Array:
    """Return experts for so many tokens of this rank, `top_k` for each."""
    draw = np.random.default_rng([seed, comm.rank])
    chosen = np.zeros((rows[comm.rank % len(rows)], EXPERTS), bool)
    for token in chosen:
        token[draw.permutation(EXPERTS)[:top_k]] = True
    return chosen


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
    """More tokens, and wider ones, each time; then few again. They outgrow a slot between devices."""
    (layer,) = layers(comm, put, ["one"])
    for step, rows in enumerate((2, 50, 400, 3)):
        layer.forward(table(comm, [rows, rows // 2], 2, step), 64 * (step + 1), "float32", comm.rank)
        layer.backward()


def two_layers(comm: Communicator, put: Put) -> None:
    """Two layers, twice each, backward in the opposite order."""
    pair = layers(comm, put, ["first", "second"])
    for step in range(4):
        pair[step % 2].forward(table(comm, [5, 8], 2, step), 20, "float32", comm.rank + step)
    for step in reversed(range(4)):
        pair[step % 2].backward()


def in_parts(comm: Communicator, put: Put) -> None:
    """Parts of the tokens travel while experts compute others: forward and backward as in a layer with chunks."""
    options, width = Experts(EXPERTS, top_k=2), 32
    x = np.random.default_rng(comm.rank).standard_normal((30 + comm.rank, width)).astype(np.float32)
    logits = np.random.default_rng([1, comm.rank]).standard_normal((len(x), EXPERTS)).astype(np.float32)

    def run(mixture: Mixture, put: Callable[[Array], Any], scale: Callable[[Any], None]) -> list[Any]:
        routing = mixture.route(logits, training=False)
        flow = ChunkedDispatch(mixture, split_tokens(routing, 4), put(x), routing.gates)
        numbers, computed, results = range(4), [], list[Any]()
        flow.dispatch(0)
        for part in numbers:
            if part + 1 < 4:
                flow.dispatch(part + 1)
            rows, gates, _ = flow.dispatched(part)
            outputs = rows.copy()
            scale(outputs)
            del rows  # memory that is reused while experts may still read it
            computed.append((outputs, gates))
            flow.combine(part, outputs, gates)
        results += [flow.combined(part) for part in numbers]
        for part in reversed(numbers):
            flow.combine_back(part, put(x[flow.parts[part].first : flow.parts[part].last]))
        for part in reversed(numbers):
            received_gates = flow.wait_combine_back(part).copy()
            gate_gradients = scale_gradients(received_gates, *computed[part])
            scale(received_gates)
            flow.dispatch_back(part, received_gates, gate_gradients)
        for part in numbers:
            results += flow.wait_dispatch_back(part)
        return results

    on_host, on_device = (Mixture("parts", options, ExpertRanks.of(one, EXPERTS)) for one in (oracle(), comm))

    def half(array: DeviceArray) -> None:
        array.device.kernels.scale(array.reshape(-1), 0.7)

    def half_on_host(array: Array) -> None:
        array *= np.float32(0.7)

    for _ in range(2):
        expected = run(on_host, lambda values: values, half_on_host)
        results = run(on_device, lambda values: as_contiguous(put(values), "parts"), half)
        for actual, correct in zip(results, expected, strict=True):
            assert_same_bits(fetch(actual), correct)


def ranks_that_disagree(comm: Communicator, put: Put) -> None:
    """Ranks that use different layers, dtypes, steps or places: all raise, and name both. Then they continue."""
    exchange = dispatcher_over(ParallelAxis(comm), ExpertPlacement.even(EXPERTS, comm.size))
    x, gates = np.ones((3, 8), np.float32), np.ones(3 * EXPERTS, np.float32)
    assigned, odd = assign(np.ones((3, EXPERTS), bool)), comm.rank == 1
    on_device = as_contiguous(put(x), "x")
    with pytest.raises(MismatchError, match=r"rows on the host.*rank 1|rank 1.*rows on the host"):
        exchange.dispatch("zeroth", assigned, x if odd else on_device, gates)
    plan, rows, received_gates, _ = exchange.dispatch("first", assigned, on_device, gates)
    with pytest.raises(MismatchError, match="layer of rank 1"):
        exchange.dispatch(f"layer of rank {int(odd)}", assigned, on_device, gates)
    with pytest.raises(MismatchError, match="float16"):
        exchange.dispatch(
            "second", assigned, as_contiguous(put(x.astype(np.float16)), "x") if odd else on_device, gates
        )
    with pytest.raises(MismatchError, match="combine, backward"):
        exchange.combine_back("first", plan, on_device) if odd else exchange.combine(
            "first", plan, rows, received_gates
        )
    np.testing.assert_array_equal(fetch(exchange.combine("first", plan, rows, received_gates)), EXPERTS * x)


def host_rows_are_refused(comm: Communicator, put: Put) -> None:
    """Experts that fetch their rows get an error."""
    exchange = dispatcher_over(ParallelAxis(comm), ExpertPlacement.even(EXPERTS, comm.size))
    x, gates = np.ones((2, 8), np.float32), np.ones(2 * EXPERTS, np.float32)
    plan, rows, received_gates, _ = exchange.dispatch(
        "one", assign(np.ones((2, EXPERTS), bool)), as_contiguous(put(x), "x"), gates
    )
    with pytest.raises(UsageError, match=r"one: float32\[\d+, 8\] is on the host"):
        exchange.combine("one", plan, fetch(rows), received_gates)
    np.testing.assert_array_equal(fetch(exchange.combine("one", plan, rows, received_gates)), EXPERTS * x)


def encoded(comm: Communicator, put: Put) -> None:
    """Rows that travel encoded lose the codec's loss, a rank's own ones nothing; numbers travel unencoded.

    Between ranks that share memory, rows travel unencoded, too.
    """
    placement, width = ExpertPlacement.even(EXPERTS, comm.size), 48
    for codec, most in (("bf16", 2**-8), ("fp8", 2**-3)):
        exchange = dispatcher_over(ParallelAxis(comm), placement, codec_of(codec))
        loss = 0 if comm.group.shares_memory or comm.size == 1 else most
        chosen = [np.random.default_rng(rank).random((9 * (rank + 1), EXPERTS)) < 0.4 for rank in range(comm.size)]
        xs = [np.random.default_rng([2, rank]).standard_normal((len(each), width)) for rank, each in enumerate(chosen)]
        x = xs[comm.rank].astype(np.float32)
        gates = np.arange(1, 1 + chosen[comm.rank].sum(), dtype=np.float32)
        plan, rows, received_gates, counts = exchange.dispatch(
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
        sums, numbers = exchange.dispatch_back("one", plan, rows, received_gates)
        assert_same_bits(fetch(numbers), gates)
        np.testing.assert_allclose(fetch(sums), x * chosen[comm.rank].sum(1)[:, None], atol=1e-5 + 60 * loss, rtol=0)


BODIES = [few_tokens, one_expert, moved_experts, growing, two_layers, in_parts, host_rows_are_refused, encoded]
