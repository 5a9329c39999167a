"""Equal inputs of ranks along an axis: without a whole weight, a difference silently trained different models."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commlib.errors import MismatchError, UsageError
from commlib.tensor_parallel import Column, Row, Sequence, Vocabulary
from commlib_torch import tensor as tp
from commlib_torch._shards import shard_of
from commlib_torch.tensor import parallelize

SEQUENCE: Any = {"norm": Sequence(1), "up": Column(sequence=1), "down": Row(sequence=1)}


class Block(nn.Module):
    """Two divided layers, dropout of a whole tensor, and a head with gathered output."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.drop, self.up, self.down = nn.Dropout(dropout), nn.Linear(6, 8), nn.Linear(8, 6, bias=False)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.down(self.up(self.drop(x)).relu()))
        return out


def build(kind: Any, plan: Any, axis: Any, *given: Any) -> Any:
    torch.manual_seed(0)
    return parallelize(kind(*given).double(), axis, plan)


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


BLOCK: Any = {"up": Column(), "down": Row(), "head": Column(gather=True)}
CASES = {
    "inputs": "the input of up, of shape",
    "labels": "the gradient of the output of head, of shape",
    "seeds": "the input of up, of shape",
}


@pytest.mark.parametrize("late", [0, 5])
@pytest.mark.parametrize("case", CASES)
def test_different_inputs_without_whole_weights_are_reported(comm: Any, case: str, late: int) -> None:
    """Regression: all weights were divided, so nothing was compared: losses were 0.2 and 2.4 on two ranks."""
    model = build(Block, BLOCK, comm, 0.5 if case == "seeds" else 0.0)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)

    def train(step: int) -> None:
        own = comm.rank if step >= late else 0
        torch.manual_seed(own if case == "seeds" else 0)
        x = numbers(own if case == "inputs" else 0, 3, 6)
        labels = numbers(own if case == "labels" else 0, 3, 4)
        optimizer.zero_grad()
        F.mse_loss(model(x), labels).backward()
        optimizer.step()

    if comm.size == 1:
        train(0)
        return
    with pytest.raises(MismatchError, match=rf"AdamW.step on rank {comm.rank} .*{CASES[case]}.*the same batches"):
        for step in range(8):
            train(step)
    assert late == 0 or step == 7  # compared before the eighth step, and not in each step


def test_different_attention_masks_are_reported(comm: Any) -> None:
    """Regression: heads of different ranks saw different tokens, and their outputs were summed."""
    if comm.size == 1:
        return
    model = build(lambda: nn.MultiheadAttention(4, 4, bias=False, batch_first=True), {"": Column()}, comm)
    x, mask = numbers(0, 2, 3, 4), torch.zeros(2, 3, dtype=torch.bool)
    mask[:, 2] = comm.rank > 0
    model(x, x, x, key_padding_mask=mask)[0].sum().backward()
    with pytest.raises(MismatchError, match=r"the mask of ColumnAttention, of shape \[2, 3\], bool"):
        torch.optim.SGD(model.parameters(), 0.1).step()


def test_different_infinite_attention_masks_are_reported(comm: Any) -> None:
    """Regression: sums of infinities are NaN, so that nothing was compared, and numpy warned."""
    if comm.size == 1:
        return
    model = build(lambda: nn.MultiheadAttention(4, 4, bias=False, batch_first=True), {"": Column()}, comm)
    optimizer, x = torch.optim.SGD(model.parameters(), 0.0), numbers(0, 2, 3, 4)
    mask = torch.full((3, 3), -torch.inf, dtype=x.dtype).triu(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x, x, x, attn_mask=mask)[0].sum().backward()
        optimizer.step()
    mask[2, 1] = comm.rank
    model(x, x, x, attn_mask=mask)[0].sum().backward()
    with pytest.raises(MismatchError, match=r"the mask of ColumnAttention, of shape \[3, 3\], float64"):
        optimizer.step()


def test_nothing_is_recorded_between_comparisons(comm: Any) -> None:
    """Nothing is recorded in evaluation, nor more than a step needs."""
    model = build(Block, BLOCK, comm)
    optimizer, axis = torch.optim.SGD(model.parameters(), 0.01), model.up.axis

    def call() -> int:
        model(numbers(0, 3, 6)).sum().backward()
        return 0 if axis.watch is None else len(axis.watch.notes)

    each = 4 if comm.size > 1 else 0  # two inputs, and the gradients of two outputs
    with torch.no_grad():
        model(numbers(0, 3, 6))
    results = []
    for _ in range(9):
        results.append(call())
        optimizer.step()
    assert results == [each, each, 0, each, 0, 0, 0, each, 0]  # before steps 1, 2, 4, 8
    assert [call() for _ in range(100)] == [0] * 100
    if comm.size > 1:
        axis.watch.on = True
        assert max(call() for _ in range(100)) == 256


class Part(nn.Module):
    """A model that takes each rank's part of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(self.norm(x)).tanh())
        return out


def test_a_whole_sequence_is_refused_as_a_part(comm: Any) -> None:
    """Regression: a plan with sequence= took the whole for a part: only the weights after a step were wrong."""
    if comm.size == 1:
        return
    with pytest.raises(UsageError, match=r"all ranks of .* call the model with the same values.*shard_sequence"):
        build(Part, SEQUENCE, comm)(numbers(0, 2, 6, 6))
    model = build(Part, SEQUENCE, comm)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(numbers(comm.rank, 2, 3, 6)).square().sum().backward()
    optimizer.step()
    with pytest.raises(MismatchError, match=r"its part of a sequence, the input of up.*is the same on all ranks"):
        model(numbers(0, 2, 3, 6)).square().sum().backward()
        optimizer.step()


def test_equal_positions_are_accepted_as_a_part(comm: Any) -> None:
    """Padding, for example, does not show whether ranks have parts, even if only one rank has it."""
    model = build(Part, SEQUENCE, comm)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    uneven = numbers(comm.rank, 2, 3 + (comm.rank == 0), 6)
    same = torch.ones(2, 3, 6), numbers(0, 2, 1, 6).expand(2, 3, 6), numbers(comm.rank, 2, 3, 6) * comm.rank
    for x in (*same, uneven):
        model(x.double()).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("way", ["verify", "example"])
def test_batches_of_plans_that_take_parts(comm: Any, way: str) -> None:
    """Regression: both were refused, as if the model required fixed numbers of features."""
    torch.manual_seed(0)
    model, given = Part().double(), numbers(comm.rank, 2, 3, 6)
    options: Any = {way: given}
    if way == "verify" and comm.size > 1:
        with pytest.raises(UsageError, match=r"verify= calls the unsharded model.*each rank's part of a sequence"):
            parallelize(model, comm, SEQUENCE, **options)
        assert type(model.up) is nn.Linear
    else:
        parallelize(model, comm, SEQUENCE, **options)(given)


def test_words_are_whole_if_the_model_divides_them(comm: Any) -> None:
    """If the sequence is divided after the embedding, all ranks have the same words."""
    plan: Any = {"0": Vocabulary(sequence=1), "1": Sequence(1), "2": Vocabulary(sequence=1, gather=True)}
    model = build(lambda: nn.Sequential(nn.Embedding(8, 6), nn.LayerNorm(6), nn.Linear(6, 8)), plan, comm)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    words = torch.arange(12).reshape(2, 6) % 8

    def step(words: Tensor) -> None:
        F.cross_entropy(model(words).flatten(0, 1), words.flatten()).backward()
        optimizer.step()

    step(words)
    if comm.size > 1:
        with pytest.raises(MismatchError, match=r"the input of 0, of shape \[2, 6\], int64, differs"):
            step((words + comm.rank) % 8)


def test_penalties_in_a_training_loop_use_whole_weights(comm: Any) -> None:
    """A penalty of this rank's part would train each rank differently, which cannot be detected."""
    torch.manual_seed(0)
    plain = nn.Linear(4, 6).double()
    model = parallelize(copy.deepcopy(plain), comm, {"": Column()})

    def orthogonal(weight: Tensor) -> Tensor:
        result: Tensor = (weight @ weight.T).sub(1.0).square().sum().sqrt()
        return result

    for penalty in (
        orthogonal(tp.gather(model.weight, comm)) + tp.reduce(model.weight.square().sum(), comm).sqrt(),
        orthogonal(plain.weight) + plain.weight.norm(),
    ):
        penalty.backward()
    shard = shard_of(model.weight)
    assert shard is not None and plain.weight.grad is not None and model.weight.grad is not None
    expected = shard.own(plain.weight.grad.numpy())
    torch.testing.assert_close(model.weight.grad.numpy(), expected, rtol=1e-12, atol=1e-12)
