"""Embeddings, logits and their loss, divided by words, compared with plain ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import commlib
from commlib.errors import MismatchError, UsageError
from commlib.schedule.layout import even
from commlib.tensor_parallel import Column, Plan, Row, Vocabulary
from commlib_torch.tensor import (
    ColumnEmbedding,
    VocabularyEmbedding,
    VocabularyLinear,
    gather,
    parallelize,
    vocabulary_cross_entropy,
)
from tests.torch_adapter.dividing import Pair, assert_equal, check, own_head, pair, random

WORDS = 11


@pytest.fixture(scope="module")
def tp(comm):
    return commlib.Mesh(tp=comm.size)["tp"]


def words(*shape: int, seed: int = 0, most: int = WORDS) -> torch.Tensor:
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("padding", [None, 0, 4, -1])
def test_an_embedding_by_words(tp, padding):
    for style, part in ((Vocabulary(), lambda whole: whole), (Vocabulary(sequence=1), own_head(tp, 1))):
        models = pair(tp, lambda: nn.Embedding(WORDS, 5, padding_idx=padding), {"": style})
        for shape in ((3, 7), (2, 2), (4, 1)):
            check(tp, models, words(*shape), part=part)
    models = pair(tp, lambda: nn.Embedding(WORDS, 5, padding_idx=padding), {"": Vocabulary()})
    check(tp, models, words(9))
    check(tp, models, words(0))
    check(tp, models, torch.tensor(WORDS - 1))
    check(tp, models, words(3, 2).int())


class Scaled(nn.Embedding):
    """A scaled embedding as in Gemma and BART."""

    def forward(self, words):
        return super().forward(words) * self.embedding_dim**0.5


class Centred(nn.Embedding):
    def forward(self, words):
        return super().forward(words) - self.weight.mean(0)


class OverTheSequence(nn.Embedding):
    def forward(self, words):
        return super().forward(words).cumsum(1)


def test_an_embedding_that_changes_its_rows(tp):
    """Regression: an embedding that scales its rows stayed whole, with the logits that share its weight."""
    for style, part in ((Vocabulary(), lambda whole: whole), (Vocabulary(sequence=1), own_head(tp, 1))):
        models = pair(tp, lambda: Scaled(WORDS, 5, padding_idx=4), {"": style})
        check(tp, models, words(3, 7), part=part)
    for kind in (Centred, OverTheSequence):
        model = kind(WORDS, 5)
        weight, before = model.weight, set(vars(model))
        with pytest.raises(UsageError, match="but Vocabulary is for Embedding"):
            parallelize(model, tp, {"": Vocabulary()})
        assert type(model) is kind and model.weight is weight and vars(model).keys() == before


def test_an_embedding_by_features(tp):
    for style, part in (
        (Column(), own_head(tp)),
        (Column(gather=True), lambda whole: whole),
        (Column(parts=(4, 5), gather=True), lambda whole: whole),
    ):
        check(tp, pair(tp, lambda: nn.Embedding(WORDS, 9, padding_idx=2), {"": style}), words(3, 7), part=part)
    models = pair(tp, lambda: nn.Embedding(WORDS, 9, scale_grad_by_freq=True), {"": Column(gather=True, sequence=1)})
    check(tp, models, words(3, 7), shards=1)


def test_norms_of_words(tp):
    """max_norm changes only the rows that are looked up."""
    models = pair(tp, lambda: nn.Embedding(WORDS, 5, max_norm=0.5), {"": Vocabulary()})
    asked = torch.tensor([1, 1, WORDS - 1])
    assert_equal(models.divided(asked), models.plain(asked))
    check(tp, models, asked)
    every = torch.arange(WORDS)
    assert_equal(models.divided(every), models.plain(every))


def test_layers_constructed_divided(tp):
    created: list[tuple[Any, Any, torch.Tensor]] = [
        (lambda: nn.Embedding(WORDS, 5), lambda: VocabularyEmbedding(WORDS, 5, tp), words(4)),
        (lambda: nn.Embedding(WORDS, 5), lambda: ColumnEmbedding(WORDS, 5, tp, style=Column(gather=True)), words(4)),
        (lambda: nn.Linear(5, WORDS), lambda: VocabularyLinear(5, WORDS, tp, style=Vocabulary(gather=True)),
         random(4, 5).float()),
    ]  # fmt: skip
    for plain, divided, x in created:
        torch.manual_seed(2)
        expected = plain()(x)
        torch.manual_seed(2)
        torch.testing.assert_close(divided()(x), expected)


class Language(nn.Module):
    """An embedding, and the logits that share its weight."""

    def __init__(self, tied: bool = True):
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(WORDS, 6), nn.Linear(6, 8), nn.Linear(8, 6)
        self.head = nn.Linear(6, WORDS, bias=not tied)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, x):
        x = self.table(x)
        return self.head(x + self.down(self.up(x).tanh()))


def plan_of(sequence: int | None = None, gather: bool = False) -> Plan:
    return {
        "table": Vocabulary(sequence=sequence), "up": Column(sequence=sequence), "down": Row(sequence=sequence),
        "head": Vocabulary(sequence=sequence, gather=gather),
    }  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sequence", [None, 1])
def test_logits(tp, tied, sequence):
    models = pair(tp, lambda: Language(tied), plan_of(sequence))
    check(tp, models, words(3, 5), part=own_head(tp))
    check(tp, pair(tp, lambda: Language(tied), plan_of(sequence, gather=True)), words(3, 5))
    if tied:
        assert models.divided.head.weight is models.divided.table.weight
        again = copy.deepcopy(models.divided)
        assert again.head.weight is again.table.weight
        check(tp, Pair(models.plain, again), words(3, 5), part=own_head(tp))


@pytest.mark.parametrize("sequence", [None, 1])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_training_with_an_optimizer_made_before(tp, optimizer, sequence):
    """Losses of a plain and a divided model with tied weights are equal in each step."""
    plain = pair(tp, Language, plan_of()).plain
    divided = copy.deepcopy(plain)
    losses: list[list[torch.Tensor]] = []
    for model, is_divided in ((plain, False), (divided, True)):
        steps = optimizer(model.parameters(), lr=0.05)
        if is_divided:
            parallelize(model, tp, plan_of(sequence))
        losses.append([])
        for step in range(4):
            x, y = words(3, 5, seed=step), words(3, 5, seed=100 + step)
            y[0, :2] = -100
            logits = model(x)
            loss = (
                vocabulary_cross_entropy(logits, y, tp, label_smoothing=0.1, vocabulary=WORDS)
                if is_divided
                else F.cross_entropy(logits.flatten(0, 1), y.flatten(), label_smoothing=0.1)
            )
            steps.zero_grad()
            loss.backward()
            steps.step()
            losses[-1].append(loss.detach())
    assert_equal(torch.stack(losses[1]), torch.stack(losses[0]), tolerance=1e-11)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (0,)])
def test_cross_entropy(tp, shape, smoothing, reduction):
    target = words(*shape, seed=3)
    if len(shape) == 2:
        target[0, 1], target[1, 2] = 7, 7
    whole, options = random(*shape, WORDS) * 30, {"label_smoothing": smoothing, "reduction": reduction}
    whole[..., 2] = 0 if smoothing else -torch.inf
    target = torch.where(target == 2, 3, target)
    plain = whole.clone().requires_grad_()
    expected = F.cross_entropy(
        plain.reshape(-1, WORDS),
        target.reshape(-1),
        ignore_index=7,
        **options,
    )
    if reduction == "none":
        expected = expected.reshape(shape)
    own = own_head(tp)(whole).clone().requires_grad_()
    got = vocabulary_cross_entropy(own, target, tp, ignore_index=7, **options)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
    factors = random(*expected.shape, seed=5)
    (expected * factors).sum().backward()
    (got * factors).sum().backward()
    assert plain.grad is not None
    torch.testing.assert_close(own.grad, own_head(tp)(plain.grad), rtol=0, atol=1e-14, equal_nan=True)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy_with_weights_of_words(tp, smoothing, reduction):
    """With smoothing, weights apply to each word's part of the loss, and a mean divides by the targets' weights."""
    whole, target, weight = random(2, 3, WORDS) * 5, words(2, 3, seed=3), random(WORDS, seed=2).abs()
    target[0, 1], weight[4] = 7, 0
    options = {"ignore_index": 7, "label_smoothing": smoothing, "reduction": reduction}
    plain, own = whole.clone().requires_grad_(), own_head(tp)(whole).clone().requires_grad_()
    expected = F.cross_entropy(plain.movedim(-1, 1), target, weight, **options)
    got = vocabulary_cross_entropy(own, target, tp, weight=weight, vocabulary=WORDS, **options)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    factors = random(*expected.shape, seed=5)
    (expected * factors).sum().backward()
    (got * factors).sum().backward()
    assert plain.grad is not None
    torch.testing.assert_close(own.grad, own_head(tp)(plain.grad), rtol=0, atol=1e-14)


@pytest.mark.ranks(min=2)
def test_different_targets_on_ranks_are_refused(tp):
    """Regression: ranks silently computed the loss of different words."""
    own, target, weight = own_head(tp)(random(4, WORDS)), words(4), random(WORDS).abs()
    other = target.roll(1) if tp.rank else target
    for _ in range(2):
        with pytest.raises(MismatchError, match="target, 4 rows"):
            vocabulary_cross_entropy(own, other, tp)
        with pytest.raises(MismatchError, match="weight: "):
            vocabulary_cross_entropy(own, target, tp, weight=weight.flip(0) if tp.rank else weight)
        with pytest.raises(MismatchError, match="ignore_index"):
            vocabulary_cross_entropy(own, target, tp, ignore_index=-tp.rank)
    # Regression: after a caught error, a rank's next call was matched with the failed one.
    with pytest.raises(UsageError if tp.rank else MismatchError, match="target of shape" if tp.rank else "same call"):
        vocabulary_cross_entropy(own, target[1:] if tp.rank else target, tp)
    vocabulary_cross_entropy(own, target, tp, weight=weight)


@pytest.mark.ranks(min=2)
def test_whole_logits_are_refused(tp):
    """Regression: gathered logits were taken for a larger vocabulary, with a wrong loss and gradient."""
    target, head = words(4), VocabularyLinear(5, WORDS, tp, style=Vocabulary(gather=True))
    whole = random(4, WORDS)
    for logits in (head(random(4, 5).float()), head(random(1, 5).float()), gather(own_head(tp)(whole), tp, -1), whole):
        with pytest.raises(UsageError, match="ranks have the same logits of 11 words, so they are not"):
            vocabulary_cross_entropy(logits * 2, target[: len(logits)], tp)


def test_equal_divided_logits_are_accepted(tp):
    """A head that starts with zeros makes equal logits on all ranks; `vocabulary` identifies the others."""
    for own, options in (
        (torch.zeros(4, 3).double(), {}),
        (torch.full((4, 3), torch.nan).double(), {}),
        (random(4, 3), {"vocabulary": 3 * tp.size}),
    ):
        whole, target = own.repeat(1, tp.size), words(4, most=3 * tp.size)
        got = vocabulary_cross_entropy(own, target, tp, **options)
        torch.testing.assert_close(got, F.cross_entropy(whole, target), equal_nan=True)


@pytest.mark.ranks(min=2)
def test_different_logits_on_ranks_are_refused(tp):
    """Regression: the core's error was about a reduction, and named neither logits nor rows."""
    own, target, is_other = own_head(tp)(random(4, WORDS)), words(4), tp.rank == 1
    with pytest.raises(MismatchError, match=f"logits of {3 if is_other else 4} rows, and other ranks have others"):
        vocabulary_cross_entropy(own[1:] if is_other else own, target[1:] if is_other else target, tp)
    with pytest.raises(MismatchError, match=f"{'float32' if is_other else 'float64'} logits of 4 rows"):
        vocabulary_cross_entropy(own.float() if is_other else own, target, tp)
    with pytest.raises(UsageError if is_other else MismatchError, match="have no tokens" if is_other else "same call"):
        vocabulary_cross_entropy(own[:, :0] if is_other else own, target, tp)
    vocabulary_cross_entropy(own, target, tp)


def test_cross_entropy_of_nothing_is_nan(tp):
    target = torch.full((3,), -100)
    plain = random(3, WORDS).requires_grad_()
    own = own_head(tp)(plain.detach()).clone().requires_grad_()
    got = vocabulary_cross_entropy(own, target, tp)
    assert got.isnan()
    F.cross_entropy(plain, target).backward()
    got.backward()
    assert plain.grad is not None
    torch.testing.assert_close(own.grad, own_head(tp)(plain.grad), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_cross_entropy_of_narrow_floats(tp, dtype):
    whole = (random(6, WORDS) * 3).to(dtype)
    plain = whole.float().clone().requires_grad_()
    own = own_head(tp)(whole).clone().requires_grad_()
    expected = F.cross_entropy(plain, words(6))
    got = vocabulary_cross_entropy(own, words(6), tp)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    expected.backward()
    got.backward()
    assert plain.grad is not None
    assert own.grad is not None
    assert own.grad.dtype == dtype
    torch.testing.assert_close(own.grad, own_head(tp)(plain.grad).to(dtype), rtol=1e-2, atol=1e-6)


def test_cross_entropy_twice(tp):
    """Its gradient may be computed again if the graph is kept, but has no second derivative."""
    logits = own_head(tp)(random(4, WORDS)).clone().requires_grad_()
    loss = vocabulary_cross_entropy(logits, words(4), tp)
    first, second = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    with pytest.raises(UsageError, match="second gradient"):
        torch.autograd.grad(loss, logits, create_graph=True)


def test_mismatched_arguments_are_refused(tp):
    cases: list[tuple[nn.Module, Any, str]] = [
        (nn.Embedding(WORDS, 4, sparse=True), Vocabulary(), "sparse=True"),
        (nn.Embedding(WORDS, 4, scale_grad_by_freq=True), Vocabulary(), "scale_grad_by_freq=True"),
        (nn.Embedding(WORDS, 4), Vocabulary(gather=True), "for logits"),
        (nn.Embedding(WORDS, 4, max_norm=1.0), Column(), "max_norm"),
    ]
    for module, style, text in cases:
        with pytest.raises(UsageError, match=text):
            parallelize(module, tp, {"": style})
    table = parallelize(nn.Embedding(WORDS, 4), tp, {"": Vocabulary()})
    for wrong in (-1, WORDS):
        with pytest.raises(UsageError, match=f"token {wrong}, expected 0 to 10"):
            table(torch.tensor([0, wrong]))
    own = own_head(tp)(random(3, WORDS))
    for target, options, text in [
        (random(3), {}, "probabilities"),
        (words(2), {}, "for a target of shape"),
        (words(3), {"weight": torch.ones(12)}, "weight has 12 tokens, expected the 11"),
        (words(3), {"weight": torch.ones(11, 1)}, "expected a float for each token"),
        (torch.tensor([0, 11, 1]), {}, "token 11, expected 0 to 10"),
        (words(3), {"vocabulary": 12}, "expected vocabulary=12"),
        (words(3), {"label_smoothing": 2.0}, "label_smoothing"),
        (words(3), {"reduction": "all"}, "reduction"),
    ]:
        with pytest.raises(UsageError, match=text):
            vocabulary_cross_entropy(own, target, tp, **options)  # type: ignore[arg-type]


@pytest.mark.ranks(min=2)
def test_tied_weights_need_one_style(tp):
    with pytest.raises(UsageError, match="tied"):
        parallelize(Language(), tp, {"table": Column(), "head": Vocabulary()})


def test_only_local_words(tp):
    """Each rank has its own words: their number is uneven, and there is no padding."""
    table: Any = parallelize(nn.Embedding(WORDS, 4), tp, {"": Vocabulary()})
    assert len(table.weight) == even(WORDS, tp.size).counts[tp.rank]


def test_frozen_words(tp):
    models = pair(tp, Language, plan_of())
    for model in models:
        model.table.weight.requires_grad_(False)
    check(tp, models, words(2, 3), part=own_head(tp))
    assert models.divided.table.weight.grad is None
