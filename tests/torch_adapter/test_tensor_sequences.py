"""Sequences divided among ranks: cut, joined and loaded; the mean of a loss, and a model trained with all of these."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from commlib.context_parallel import SequenceLayout
from commlib.errors import CommlibError, MismatchError, PeerError, UsageError
from commlib_torch.tensor import context as cp

LAYOUTS = ["balanced", "contiguous"]


def ids(tokens: int, batch: int = 2, seed: int = 1) -> Tensor:
    """Draw tokens of whole sequences."""
    return torch.randint(0, 11, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def places(comm: Any, tokens: int, layout: str = "balanced") -> list[int]:
    """Return this rank's positions."""
    return [at for part in SequenceLayout(tokens, comm.size, layout).ranges(comm.rank) for at in part]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [1, 2, 7, 16])
def test_joining_reverses_cutting(comm: Any, layout: Any, tokens: int) -> None:
    for dim in (0, 1, -1):
        x = torch.arange(2 * 3 * tokens).reshape(2, 3, tokens).transpose(dim, 2).double().requires_grad_()
        own = cp.shard_sequence(x, comm, dim, layout=layout)
        assert torch.equal(own, x.index_select(dim, torch.tensor(places(comm, tokens, layout), dtype=torch.int64)))
        whole = cp.unshard_sequence(own, comm, dim, layout=layout)
        assert torch.equal(whole, x)
        (gradient,) = torch.autograd.grad((whole * x.detach()).sum(), x)  # each rank's own tokens count once
        assert torch.equal(cp.shard_sequence(gradient, comm, dim, layout=layout), own)
        assert int(gradient.count_nonzero()) == int(own.count_nonzero())
        assert cp.position_ids(tokens, comm, layout=layout).tolist() == places(comm, tokens, layout)


@pytest.mark.ranks(min=2)
def test_shards_of_another_layout_are_refused(comm: Any) -> None:
    with pytest.raises(UsageError, match="tokens, but of"):
        cp.unshard_sequence(torch.zeros(2, 1 + 2 * comm.rank), comm)
    with pytest.raises(MismatchError, match="layout"):
        cp.unshard_sequence(torch.zeros(2, 2), comm, layout=LAYOUTS[comm.rank == 0])
    with pytest.raises(UsageError, match="no dimension 2"):
        cp.shard_sequence(torch.zeros(2, 2), comm, 2)


def test_the_mean_of_a_loss(comm: Any) -> None:
    """A mean of means would give the tokens of ranks with few of them too much weight."""
    loss = torch.tensor(3.0 * (comm.rank + 1), requires_grad=True)
    counts = [0, 5, 2, 4][: comm.size] if comm.size > 1 else [5]
    mean = cp.loss_mean(loss, counts[comm.rank], comm)
    total = sum(3.0 * (rank + 1) for rank in range(comm.size))
    assert mean.dtype is torch.float32
    assert float(mean.detach()) == pytest.approx(total / sum(counts), rel=1e-6)
    mean.backward()
    assert loss.grad is not None
    assert float(loss.grad) == pytest.approx(comm.size / sum(counts), rel=1e-6)  # for an average
    assert math.isnan(cp.loss_mean(torch.tensor(0.0), 0, comm))
    assert float(cp.loss_mean(torch.tensor(2.0), torch.tensor(4), comm)) == 0.5
    with pytest.raises(UsageError, match="reduction='sum'"):
        cp.loss_mean(torch.zeros(3), 3, comm)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reads", ["all", "first"])
def test_batches_are_divided(comm: Any, layout: str, reads: str) -> None:
    """Labels are shifted first: otherwise the last token of each shard would lose its target."""
    batches: list[dict[str, Any]] = [
        {"input_ids": ids(9, seed=seed), "weights": ids(9, seed=seed + 5)[..., None].double(), "name": "x"}
        for seed in (1, 2)
    ]
    given = batches if reads == "all" or comm.rank == 0 else None
    results = list(cp.SequenceLoader(given, comm, layout=layout, reads=reads, whole=["name"]))
    assert len(results) == 2
    for batch, own in zip(batches, results, strict=True):
        at, whole = places(comm, 9, layout), batch["input_ids"]
        assert isinstance(whole, Tensor)
        shifted = torch.cat((whole[:, 1:], torch.full((2, 1), -100)), 1)
        assert torch.equal(own["input_ids"], whole[:, at])
        assert torch.equal(own["labels"], shifted[:, at])
        assert torch.equal(own["position_ids"], torch.tensor([at, at]).reshape(2, -1))
        assert torch.equal(own["weights"], batch["weights"][:, at])
        assert own["name"] == "x"


def test_packed_documents(comm: Any) -> None:
    batch = {"input_ids": np.arange(8, dtype=np.uint16)[None], "documents": np.array([0, 3, 8])}
    (own,) = cp.SequenceLoader([batch], comm, ignore=-1)
    at = places(comm, 8)
    assert own["documents"] == (0, 3, 8)
    assert own["position_ids"][0].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4][place] for place in at]
    assert own["labels"][0].tolist() == [[1, 2, -1, 4, 5, 6, 7, -1][place] for place in at]
    assert own["labels"].dtype is torch.int64


def test_labels_may_be_given(comm: Any) -> None:
    tokens, labels = ids(6), ids(6, seed=2)
    at = places(comm, 6)
    (shifted,) = cp.SequenceLoader([(tokens, labels)], comm)
    assert torch.equal(shifted["labels"], torch.cat((labels[:, 1:], torch.full((2, 1), -100)), 1)[:, at])
    (kept,) = cp.SequenceLoader([(tokens, labels)], comm, shift=False)
    assert torch.equal(kept["labels"], labels[:, at])
    (alone,) = cp.SequenceLoader([tokens], comm, tokens="x", labels="y")
    assert torch.equal(alone["y"], torch.cat((tokens[:, 1:], torch.full((2, 1), -100)), 1)[:, at])
    assert len(cp.SequenceLoader([tokens], comm)) == 1


@pytest.mark.parametrize(
    ("batch", "options", "text"),
    [
        ({"x": torch.zeros(2, 4)}, {}, "expected 'input_ids'"),
        ({"input_ids": torch.zeros(2, 4), "mask": torch.zeros(2, 5)}, {}, "'mask' has shape"),
        ({"input_ids": torch.zeros(4)}, {}, "no dimension 1"),
        (torch.zeros(2, 4), {"shift": False}, "has no 'labels'"),
        ((1, 2, 3), {}, "has 3 elements"),
        (torch.zeros(2, 4), {"reads": "some"}, "expected 'all' or 'first'"),
        (torch.zeros(2, 4), {"layout": "some"}, "expected 'balanced' or"),
        ({"input_ids": torch.zeros(2, 4), "documents": (0, 5)}, {}, "from 0 to 4"),
    ],
    ids=str,
)
def test_mismatched_batches_are_refused(comm: Any, batch: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        list(cp.SequenceLoader([batch], comm, **options))


@pytest.mark.ranks(min=2)
def test_different_batches_on_a_rank_are_refused(comm: Any) -> None:
    """Regression: with a loader that shuffles differently on each rank, ranks had parts of different sequences."""
    with pytest.raises(MismatchError, match="input_ids"):
        list(cp.SequenceLoader([ids(8, seed=comm.rank)], comm))
    with pytest.raises(MismatchError, match="no further batch"):
        list(cp.SequenceLoader([ids(8)] * (1 + (comm.rank == 0)), comm))


@pytest.mark.ranks(min=2)
def test_the_first_rank_cannot_read(comm: Any) -> None:
    def broken() -> Iterator[Tensor]:
        yield ids(8)
        raise OSError("no such file")

    kind = OSError if comm.rank == 0 else PeerError
    with pytest.raises(kind, match="no such file"):
        list(cp.SequenceLoader(broken() if comm.rank == 0 else None, comm, reads="first"))
    assert issubclass(PeerError, CommlibError)
    # Regression: an object that cannot be sent made the others wait.
    batch = {"input_ids": ids(8), "of": lambda: None}
    with pytest.raises(PeerError if comm.rank else Exception, match="pickle"):
        list(cp.SequenceLoader([batch], comm, reads="first", whole=["of"]))


@pytest.mark.ranks(min=2)
def test_another_rank_cannot_read(comm: Any) -> None:
    """Regression: a rank that failed raised alone, and the others waited for its batch for ever."""

    class Closed:
        def __iter__(self) -> Iterator[Tensor]:
            raise OSError("no such file")

    def broken() -> Iterator[Tensor]:
        yield ids(8)
        raise OSError("no such file")

    is_last = comm.rank == comm.size - 1
    batches: list[tuple[Any, type[Exception], str]] = [
        (broken(), OSError, "no such file"),
        (Closed(), OSError, "no such file"),
        ([ids(8), {"words": ids(8)}], UsageError, "expected 'input_ids'"),
    ]
    for bad, kind, text in batches:
        with pytest.raises(kind if is_last else PeerError, match=text):
            list(cp.SequenceLoader(bad if is_last else [ids(8)] * 2, comm))
    with pytest.raises(UsageError if is_last else MismatchError, match="has no batches"):
        cp.SequenceLoader(None if is_last else [ids(8)], comm)
    with pytest.raises(MismatchError, match="shift"):
        cp.SequenceLoader([ids(8)], comm, shift=is_last)
    assert len(list(cp.SequenceLoader([ids(8)], comm))) == 1


@pytest.mark.filterwarnings("error")
def test_read_only_arrays_are_accepted(comm: Any) -> None:
    """Regression: PyTorch warned of undefined behaviour, for positions of one row and for arrays of files."""
    whole = np.arange(8)[None]
    whole.flags.writeable = False
    (own,) = cp.SequenceLoader([whole], comm)
    assert own["input_ids"].tolist() == own["position_ids"].tolist() == [places(comm, 8)]
    own["position_ids"] += 1


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("method", ["ring", "all_to_all"])
def test_attention_trained_on_one_rank_only_is_refused(comm: Any, method: Any) -> None:
    """Regression: that rank waited in its backward for the others, which had none."""
    q, k, v = (torch.zeros(1, 2, 4, 8).requires_grad_(comm.rank == 0) for _ in range(3))
    with pytest.raises(MismatchError, match="learns"):
        cp.attention(q, k, v, comm, method=method)


class Model(nn.Module):
    """A decoder with one layer, grouped queries and learned positions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(11, 8), nn.Embedding(20, 8)
        self.q, self.kv, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 11)
        self.double()

    def forward(self, tokens: Tensor, places: Tensor, attend: Any) -> Tensor:
        x = self.tokens(tokens) + self.places(places)
        q = self.q(x).unflatten(-1, (4, 2)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (4, 2)).transpose(1, 2).chunk(2, 1)
        result: Tensor = self.out(x + attend(q, k, v).transpose(1, 2).flatten(2))
        return result


@pytest.mark.parametrize("method", ["ring", "all_to_all"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_trains_as_in_one_process(comm: Any, method: Any, layout: Any) -> None:
    model, alone = Model(), Model()
    optimizer, plain = (torch.optim.SGD(one.parameters(), 0.3, 0.9) for one in (model, alone))
    batches = [ids(13, seed=seed) for seed in range(3)]
    loader = cp.SequenceLoader(batches, comm, layout=layout)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cp.attention(q, k, v, comm, causal=True, layout=layout, method=method)

    def attend_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    for whole, own in zip(batches, loader, strict=True):
        labels = own["labels"]
        logits = model(own["input_ids"], own["position_ids"], attend)
        total = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        loss = cp.loss_mean(total, (labels != -100).sum(), comm)
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            comm.all_reduce(parameter.grad.numpy(), "mean", out=parameter.grad.numpy())
        expected = cross_entropy(
            alone(whole, torch.arange(13).expand(2, 13), attend_alone)[:, :-1].flatten(0, 1), whole[:, 1:].flatten()
        )
        expected.backward()
        assert float(loss) == pytest.approx(float(expected), rel=1e-12)
        for optimizer_ in (optimizer, plain):
            optimizer_.step()
            optimizer_.zero_grad()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert float((one - other).abs().max()) <= 1e-12 * float(other.abs().max())
