"""Losses of a pipeline match one process for every kind of mean, or are refused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commlib.errors import PeerError, UsageError
from commlib_torch import pipeline

functions: Any = F  # their known types lack a weight
WIDTH = 6
EXACT = 1e-11  # microbatches are summed in another order than in one process: some ulps of float64
WEIGHTS = torch.arange(1.0, WIDTH + 1, dtype=torch.float64)
IGNORED = -100


def layers(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    own = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*own, *more).double()


def inputs(rows: int, *shape: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, *shape, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def classes(rows: int, *shape: int, ignored: bool = True, seed: int = 2) -> Tensor:
    """Return classes, an increasing number of which are ignored in the last rows."""
    result = torch.randint(WIDTH, (rows, *shape), generator=torch.Generator().manual_seed(seed))
    if ignored:
        flat = result.reshape(rows, -1)
        for row in range(rows // 2, rows):
            flat[row, : row - rows // 2 + 1] = IGNORED
    return result


def floats(*shape: int, seed: int = 3) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def words(loss: Callable[..., Tensor] = F.cross_entropy, **options: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, target: loss(output.flatten(0, 1), target.flatten(), **options)


def next_words(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def by_hand(output: Tensor, target: Tensor) -> Tensor:
    losses, counts = F.cross_entropy(output, target, reduction="none"), target != IGNORED
    return (losses * counts).sum() / counts.sum()


def assert_matches_one_process(comm: Any, loss: Any, *batches: Any, model: Any = layers, **options: Any) -> None:
    """Compare losses, accumulated gradients of batches, and the results of evaluate."""
    whole = model()
    pipe = pipeline(model(), comm, loss=loss, microbatches=4, **options)
    try:
        for x, y in batches:
            expected = loss(whole(x), y)
            expected.backward()
            with torch.no_grad():
                evaluated = pipe.evaluate(x, y)
            got = pipe.step(x if comm.rank == pipe.pipe.first else None, y if comm.rank == pipe.pipe.last else None)
            torch.testing.assert_close(got, expected.detach(), rtol=EXACT, atol=EXACT)
            torch.testing.assert_close(evaluated, expected.detach(), rtol=EXACT, atol=EXACT)
        named = dict(whole.named_parameters())
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, named[name].grad, rtol=EXACT, atol=EXACT)
    finally:
        pipe.close()


OF_CLASSES = {
    "ignored": nn.CrossEntropyLoss(),
    "function": F.cross_entropy,
    "partial": partial(F.cross_entropy, label_smoothing=0.1),
    "weights": nn.CrossEntropyLoss(weight=WEIGHTS),
    "weights and smoothing": nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.2),
    "another index": nn.CrossEntropyLoss(ignore_index=2),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "legacy sum": partial(F.cross_entropy, size_average=False),
    "likelihood": lambda output, target: F.nll_loss(output.log_softmax(-1), target, weight=WEIGHTS),
    "half of it": lambda output, target: 0.5 * F.cross_entropy(output, target),
    "with metrics of nothing": lambda output, target: (F.cross_entropy(output, target), {})[0],
}


@pytest.mark.parametrize("name", OF_CLASSES)
def test_ignored_and_weighted_classes(comm: Any, name: str) -> None:
    """Regression: microbatches counted by their rows, although targets were ignored and classes weighted."""
    ignored = 2 if "index" in name else IGNORED
    some, few = ((rows := classes(count)).where(rows != IGNORED, ignored) for count in (9, 6))
    some[7:] = ignored  # a microbatch without terms
    batches = (inputs(9), classes(9, ignored=False, seed=7)), (inputs(9), some), (inputs(6), few)
    assert_matches_one_process(comm, OF_CLASSES[name], *batches)


@pytest.mark.parametrize("name", ["zb_h1", "interleaved"])
def test_a_microbatch_without_terms_does_not_count(comm: Any, name: Any) -> None:
    """Regression: 0/0 times a share of 0 was NaN, in the loss and in the weights."""
    target = classes(8, ignored=False)
    target[2:4] = IGNORED
    target[6:] = IGNORED
    for weigh in (lambda y: (y != IGNORED).sum(), lambda target, inputs: (target != IGNORED).sum() + 0 * len(inputs)):
        more = [nn.Tanh() for _ in range(2 * comm.size - 5)]
        pipe = pipeline(layers(*more), comm, loss=by_hand, microbatches=4, schedule=name, weigh=weigh)
        whole = layers(*more)
        expected = by_hand(whole(inputs(8)), target)
        expected.backward()
        torch.testing.assert_close(pipe.step(inputs(8), target), expected.detach(), rtol=EXACT, atol=0)
        torch.testing.assert_close(pipe.evaluate(inputs(8), target), expected.detach(), rtol=EXACT, atol=0)
        named = dict(whole.named_parameters())
        for key, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, named[key].grad, rtol=EXACT, atol=EXACT)
        pipe.close()


OF_WORDS = {
    "ignored": words(),
    "sum": words(reduction="sum"),
    "weights": words(weight=WEIGHTS),
    "transposed": lambda output, target: F.cross_entropy(output.transpose(1, 2), target),
    "next words": next_words,
    "likelihood": lambda output, target: F.nll_loss(output.log_softmax(-1).flatten(0, 1), target.flatten()),
}


@pytest.mark.parametrize("name", OF_WORDS)
def test_ignored_words(comm: Any, name: str) -> None:
    """A user-defined function that calls one of torch's losses works like that loss."""
    batches = (inputs(8, 5), classes(8, 5, ignored=False)), (inputs(7, 5), classes(7, 5)), (inputs(7, 3), classes(7, 3))
    assert_matches_one_process(comm, OF_WORDS[name], *batches)


OF_FLOATS: dict[str, Any] = {
    "squares": nn.MSELoss(),
    "sum of squares": nn.MSELoss(reduction="sum"),
    "absolutes": nn.L1Loss(),
    "smooth": nn.SmoothL1Loss(),
    "sum of smooth": nn.SmoothL1Loss(reduction="sum"),
    "huber": nn.HuberLoss(),
    "weighted squares": lambda output, target: functions.mse_loss(output, target, weight=target),
    "weighted absolutes": lambda output, target: functions.l1_loss(output, target, weight=target),
    "sum of weighted squares": lambda o, target: functions.mse_loss(o, target, weight=target, reduction="sum"),
    "weighted huber": lambda output, target: functions.huber_loss(output, target, weight=target),
    "logits": nn.BCEWithLogitsLoss(weight=WEIGHTS, pos_weight=WEIGHTS),
    "divergence by rows": nn.KLDivLoss(reduction="batchmean"),
    "divergence": nn.KLDivLoss(reduction="mean"),
    "sum of divergence": nn.KLDivLoss(reduction="sum"),
    "poisson": nn.PoissonNLLLoss(),
    "margins": nn.MultiLabelSoftMarginLoss(),
    "soft margins": lambda output, target: F.soft_margin_loss(output, target.round() * 2 - 1),
    "gaussian": lambda output, target: F.gaussian_nll_loss(output, target, target + 1),
    "probabilities": nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1),
    "two": lambda output, target: F.mse_loss(output, target) + 0.1 * F.l1_loss(output, target),
    "by hand": lambda output, target: ((output - target) ** 2).mean(),
    "triplets": lambda output, target: F.triplet_margin_loss(output, target, target.flip(-1)),
    "cosines": lambda output, target: F.cosine_embedding_loss(output, target, target[:, 0].round() * 2 - 1),
    "of 5 classes": lambda output, target: F.multi_margin_loss(output, target[:, 0].round().long(), weight=WEIGHTS),
}


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("name", OF_FLOATS)
def test_other_losses(comm: Any, name: str) -> None:
    """Regression: sums were divided by the number of microbatches."""
    batches = [(inputs(rows), floats(rows, WIDTH, seed=rows)) for rows in (9, 8, 3)]
    assert_matches_one_process(comm, OF_FLOATS[name], *batches)


def test_weights_in_the_target(comm: Any) -> None:
    """torch divides by their sum. Regression: this was refused. A microbatch without weights does not count."""
    weights = floats(9, WIDTH, seed=4)
    weights[:3] = 0
    batches = [(inputs(9), (floats(9, WIDTH), weights)), (inputs(9), (floats(9, WIDTH), weights.flip(0)))]
    assert_matches_one_process(comm, lambda output, y: functions.mse_loss(output, y[0], weight=y[1]), *batches)


@pytest.mark.parametrize("is_column", [True, False])
def test_weights_of_rows_in_the_target(comm: Any, is_column: bool) -> None:
    """Regression: weights of elements worked, but weights of rows expanded to elements were refused."""
    weights = floats(9, seed=4)
    weights[:3] = 0

    def loss(output: Tensor, y: tuple[Tensor, Tensor]) -> Tensor:
        weight = y[1] if is_column else y[1][:, None]
        return functions.mse_loss(output, y[0], weight=weight.expand_as(output))  # type: ignore[no-any-return]

    own = [weights, weights.flip(0)]
    batches = [(inputs(9), (floats(9, WIDTH), one[:, None] if is_column else one)) for one in own]
    assert_matches_one_process(comm, loss, *batches)


@pytest.mark.parametrize("kind", ["expanded", "copied", "elements"])
def test_weights_that_initially_look_like_a_mask(comm: Any, kind: str) -> None:
    """Regression: weights that were all ones at first were taken for a mask, and refused once they changed."""
    ones, later = torch.ones(8, dtype=torch.float64), torch.tensor([1, 1, 1, 1, 0.5, 0, 2, 1], dtype=torch.float64)
    if kind == "elements":
        ones, later = (one[:, None].repeat(1, WIDTH) for one in (ones, later))

    def loss(output: Tensor, y: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        weight = y[2] if kind == "elements" else y[2][:, None].expand_as(output)
        return functions.mse_loss(output, y[0], weight=weight.contiguous() if kind == "copied" else weight)  # type: ignore[no-any-return]

    batches = [(inputs(8), (floats(8, WIDTH), ones.clone(), weights)) for weights in (ones, later, later.flip(0))]
    assert_matches_one_process(comm, loss, *batches)


def dice(output: Tensor, target: Tensor) -> Tensor:
    chances = output.sigmoid()
    return 1 - 2 * (chances * target).sum() / (chances.sum() + target.sum())


def mixing(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output[:, :1], target[:, 0])  # (rows, 1) and (rows): all pairs


class Contrastive(nn.Module):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output @ target.T, torch.arange(len(output)))


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "dice": (dice, floats(8, WIDTH).round(), "weigh="),
    "mixing": (mixing, floats(8, WIDTH), "weigh="),
    "contrastive": (Contrastive(), floats(8, WIDTH), "weigh="),
    "sum by hand": (lambda o, t: ((o - t) ** 2).sum(), floats(8, WIDTH), 'weigh="sum"'),
    "mean of words by hand": (by_hand, classes(8), "weigh="),
    "weights from elsewhere": (lambda o, t: functions.mse_loss(o, t, weight=t > 0.7), floats(8, WIDTH), "weigh="),
    "deviation": (lambda o, t: (o - t).std(), floats(8, WIDTH), "weigh="),
    "two terms": (
        lambda o, t: F.cross_entropy(o, t) + F.mse_loss(o, o.detach() * 0.5), classes(8), "weigh=",
    ),
    "scaled sum": (lambda o, t: F.mse_loss(o, t, reduction="sum") / 3, floats(8, WIDTH), 'weigh="sum"'),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_losses_that_are_no_mean_over_rows_are_refused(comm: Any, name: str) -> None:
    """Regression: Dice silently gave 0.0 instead of 205.6."""
    loss, target, remedy = REFUSED[name]
    pipe = pipeline(layers(), comm, loss=loss, microbatches=4)
    with pytest.raises(UsageError, match=remedy):
        pipe.step(inputs(8), target)
    with pytest.raises(UsageError, match=remedy):
        pipe.evaluate(inputs(8), target)
    pipe.close()
    pipe = pipeline(layers(), comm, loss=loss, microbatches=4, weigh="rows")  # the user's word is taken
    pipe.step(inputs(8), target)
    pipe.close()


def test_the_loss_may_change_its_call_from_batch_to_batch(comm: Any) -> None:
    """A rule holds for equal calls; another function, option or kind of targets has its own rule."""
    chosen: dict[str, Any] = {}

    def loss(output: Tensor, target: Tensor) -> Tensor:
        result: Tensor = chosen["function"](output, target, **chosen["options"])
        return result

    whole, pipe = layers(), pipeline(layers(), comm, loss=loss, microbatches=4)
    ways: list[tuple[Any, dict[str, Any], Tensor]] = [
        (F.cross_entropy, {}, classes(8)),
        (F.cross_entropy, {"weight": WEIGHTS}, classes(8)),
        (F.cross_entropy, {"weight": WEIGHTS.flip(0)}, classes(8)),
        (F.cross_entropy, {}, floats(8, WIDTH)),
        (F.cross_entropy, {"ignore_index": 2}, classes(8, ignored=False)),
        (F.cross_entropy, {"reduction": "sum"}, classes(8)),
        (F.mse_loss, {}, floats(8, WIDTH)),
        (F.multilabel_soft_margin_loss, {}, floats(8, WIDTH)),
        (F.mse_loss, {"reduction": "sum"}, floats(8, WIDTH)),
    ]
    for function, options, target in [way for way in ways for _ in range(2)]:
        chosen.update(function=function, options=options)
        expected = loss(whole(inputs(8)), target)
        expected.backward()
        torch.testing.assert_close(pipe.step(inputs(8), target), expected.detach(), rtol=EXACT, atol=EXACT)
    named = dict(whole.named_parameters())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, named[name].grad, rtol=EXACT, atol=EXACT)
    pipe.close()


def test_words_may_be_ignored_in_later_batches(comm: Any) -> None:
    """The first batches may have no ignored words, and the numbers of words need not be known in advance."""

    def every_other(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output[:, ::2].flatten(0, 1), target[:, ::2].flatten())

    pipe = pipeline(layers(), comm, loss=every_other, microbatches=4)
    whole = layers()
    for seed in range(3):
        x, y = inputs(8, 5, seed=seed), classes(8, 5, ignored=False, seed=seed)
        torch.testing.assert_close(pipe.step(x, y), every_other(whole(x), y).detach(), rtol=EXACT, atol=0)
    with pytest.raises(UsageError, match="means of 6, 6, 4, 2 terms, but were weighted by their rows: pass weigh="):
        pipe.step(inputs(8, 5), classes(8, 5))
    pipe.close()


class Labelled(nn.Module):
    """Computes its own loss, as models of libraries do, and returns it with its output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        output = self.second(torch.tanh(self.first(x)))
        return F.cross_entropy(output, labels), output


def test_a_loss_within_the_model(comm: Any) -> None:
    """Regression: its ignored labels were not seen, as those of a function are."""

    def labelled() -> Labelled:
        torch.manual_seed(0)
        return Labelled().double()

    def of_output(output: Any) -> Any:
        return output[0]

    def weigh(target: None, inputs: tuple[Tensor, Tensor]) -> Tensor:
        return (inputs[1] != IGNORED).sum()

    batches = [(inputs(8), classes(8, ignored=ignored)) for ignored in (False, True)]
    for given in (None, weigh):
        pipe = pipeline(labelled(), comm, loss=of_output, microbatches=4, weigh=given)
        for x, y in batches[: 1 if given is None else 2]:
            torch.testing.assert_close(pipe.step((x, y)), labelled()(x, y)[0].detach(), rtol=EXACT, atol=0)
        if given is None:
            with pytest.raises(
                UsageError, match="means of 2, 2, 0, 0 terms, but were weighted by their rows: pass weigh="
            ):
                pipe.step(batches[1])
        pipe.close()


class Summed(Labelled):
    """A model whose loss is a sum, or derived from one."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        loss = F.cross_entropy(self.second(torch.tanh(self.first(x))), labels, reduction="sum")
        return loss if self.scale == 1 else loss * self.scale


def test_a_sum_within_the_model(comm: Any) -> None:
    """Regression: its loss and gradients were silently divided by the number of microbatches."""

    def summed(scale: float) -> Summed:
        torch.manual_seed(0)
        return Summed(scale).double()

    x, y, whole = inputs(8), classes(8), summed(1)
    pipe = pipeline(summed(1), comm, loss=lambda output: output, microbatches=4)
    for _ in range(2):
        whole.zero_grad()
        pipe.zero_grad()
        loss = whole(x, y)
        loss.backward()
        torch.testing.assert_close(pipe.step((x, y)), loss.detach(), rtol=EXACT, atol=0)
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad, rtol=EXACT, atol=1e-14)
    torch.testing.assert_close(pipe.evaluate((x, y)), loss.detach(), rtol=EXACT, atol=0)
    pipe.close()
    for weigh in (None, "sum"):
        pipe = pipeline(summed(2), comm, loss=lambda output: output, microbatches=4, weigh=weigh)
        with warnings.catch_warnings(record=True) as result:
            warnings.simplefilter("always")
            value = pipe.step((x, y))
            pipe.step((x, y))
        messages = [str(one.message) for one in result if 'pass weigh="sum"' in str(one.message)]
        assert len(messages) == (weigh is None and comm.rank == comm.size - 1)
        if weigh:
            torch.testing.assert_close(value, 2 * loss.detach(), rtol=EXACT, atol=0)
        pipe.close()


def test_results_of_weigh_are_checked(comm: Any) -> None:
    pipe = pipeline(layers(), comm, loss=F.cross_entropy, microbatches=4, weigh=len)
    with pytest.raises(UsageError, match="weighted by what weigh= says"):
        pipe.step(inputs(8), classes(8))
    pipe.close()
    pipe = pipeline(layers(), comm, loss=lambda o, t: (o - t).square().sum(), microbatches=4, weigh="sum")
    x, y = inputs(8), floats(8, WIDTH)
    torch.testing.assert_close(pipe.step(x, y), (layers()(x) - y).square().sum().detach(), rtol=EXACT, atol=0)
    pipe.close()
    with pytest.raises(UsageError, match="weigh is 'mean', expected a function"):
        pipeline(layers(), comm, loss=F.cross_entropy, microbatches=4, weigh="mean")


def test_a_check_has_no_side_effects(comm: Any) -> None:
    """The check calls the loss once more, on a copy of its state, and restores the random generators."""
    seen: list[float] = []
    keeps = nn.ModuleList([nn.BatchNorm1d(WIDTH, affine=False).double()])

    def noisy(output: Tensor, target: Tensor) -> Tensor:
        keeps[0](output)
        value = F.mse_loss(F.dropout(output, 0.5), target, reduction="none").mean()
        seen.append(float(value.detach()))
        return value

    whole, x, y = layers(), inputs(8), floats(8, WIDTH)
    pipe = pipeline(layers(), comm, loss=noisy, microbatches=4)
    torch.manual_seed(5)
    got = pipe.step(x, y)
    if comm.rank == pipe.pipe.last:
        assert len(seen) == 4 and keeps[0].num_batches_tracked == 4
        drawn = torch.rand(2)
        torch.manual_seed(5)
        with torch.no_grad():
            expected = [noisy(whole(x[rows : rows + 2]), y[rows : rows + 2]) for rows in range(0, 8, 2)]
        torch.testing.assert_close(got, torch.stack(expected).mean(), rtol=EXACT, atol=0)
        assert torch.equal(drawn, torch.rand(2))
    pipe.close()


@pytest.mark.parametrize("loss", [F.cross_entropy, nn.CrossEntropyLoss()], ids=["function", "module"])
def test_the_original_of_a_compiled_loss_is_watched(comm: Any, loss: Any) -> None:
    batches = (inputs(8), classes(8, ignored=False)), (inputs(9), classes(9))
    assert_matches_one_process(comm, torch.compile(loss, backend="eager"), *batches)


def test_updates_within_a_batch_weigh_words(comm: Any) -> None:
    """PipeDream updates after a number of microbatches: the weights of a microbatch refer to these."""
    x, y = inputs(8), classes(8)
    one = copy.deepcopy(layers())
    pipe = pipeline(
        layers(), comm, loss=F.cross_entropy, microbatches=4, schedule="pipedream", every=4,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
    )  # fmt: skip
    pipe.step(x, y)
    loss = F.cross_entropy(one(x), y)
    loss.backward()
    torch.optim.SGD(one.parameters(), lr=0.1).step()
    expected = one.state_dict()
    for name, value in pipe.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-10)
    pipe.close()


def marking(output: Tensor, target: Tensor) -> Tensor:
    target[target == 0] = IGNORED
    return F.cross_entropy(output, target)


@pytest.mark.parametrize("microbatches", [3, 4])
def test_a_loss_that_marks_its_targets(comm: Any, microbatches: int) -> None:
    """Regression: terms were counted before targets were masked: a fully masked microbatch gave NaN."""
    model = layers()
    whole = copy.deepcopy(model)
    pipe = pipeline(model, comm, microbatches=microbatches, loss=marking)
    for y in ([0, 0, 2, 5, 0, 3, 4, 1], [1, 0, 2, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 1, 0, 1]):
        x, target = inputs(8), torch.tensor(y)
        expected = marking(whole(x), target.clone())
        expected.backward()
        torch.testing.assert_close(pipe.step(x, target.clone()), expected.detach(), rtol=EXACT, atol=EXACT)
        torch.testing.assert_close(pipe.evaluate(x, target.clone()), expected.detach(), rtol=EXACT, atol=EXACT)
    for name, weight in pipe.named_parameters():
        torch.testing.assert_close(weight.grad, whole.get_parameter(name).grad, rtol=EXACT, atol=EXACT)
    pipe.close()


def with_penalty(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    return {"words": F.cross_entropy(output, target), "penalty": 0.1 * output.square().mean()}


def test_a_loss_of_several_summands(comm: Any) -> None:
    """Regression: no weigh= could weigh a mean over words plus one over rows; batches without ignored words hid it."""
    model = layers()
    whole, x, y = copy.deepcopy(model), inputs(8), classes(8)
    weigh: dict[str, Any] = {"words": lambda target: (target != IGNORED).sum(), "penalty": "rows"}
    pipe = pipeline(model, comm, microbatches=4, loss=with_penalty, weigh=weigh, verify=(x, y))
    expected = torch.stack([*with_penalty(whole(x), y).values()]).sum()
    expected.backward()
    loss, own, _metrics, _ = pipe.step(x, y, details=True)
    torch.testing.assert_close(loss, expected.detach(), rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(sum(own), loss.item(), rtol=EXACT, atol=EXACT)
    for name, weight in pipe.named_parameters():
        torch.testing.assert_close(weight.grad, whole.get_parameter(name).grad, rtol=EXACT, atol=EXACT)
    pipe.close()
    wrong = pipeline(model, comm, microbatches=4, loss=with_penalty, weigh={**weigh, "penalty": weigh["words"]})
    with pytest.raises(UsageError, match="what weigh= says of penalty"):
        wrong.step(x, y)
    wrong.close()
    pipe = pipeline(model, comm, microbatches=4, loss=lambda *given: sum(with_penalty(*given).values()))
    pipe.step(x, classes(8, ignored=False))
    pipe.step(x, classes(8, ignored=False))
    pipe.step(x, classes(8, ignored=False))
    with pytest.raises(UsageError, match="several summands"):  # the first batch that reveals it
        pipe.step(x, y)
    pipe.close()


def test_undeclared_summands_are_refused(comm: Any) -> None:
    pipe = pipeline(layers(), comm, microbatches=2, loss=with_penalty)
    with pytest.raises((UsageError, PeerError), match="weigh= says nothing of summands"):
        pipe.step(inputs(8), classes(8))
    pipe.close()
    with pytest.raises(UsageError, match="weigh is"):
        pipeline(layers(), comm, microbatches=2, loss=with_penalty, weigh={"words": None})  # type: ignore[dict-item]
