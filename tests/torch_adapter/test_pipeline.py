"""A model in stages trains as it does in one process, under every schedule."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import commlib_torch as ct
from commlib.errors import MismatchError, UsageError
from commlib.pipeline.pipe import Split
from commlib.pipeline.schedule import simulate, table
from commlib_torch import pipeline
from tests.bodies.pipelines import assert_a_failing_loss_is_reported

FLUSHING = [name for name, plan in table.items() if not plan.updates]
WIDTH = 6

# Gradients of microbatches are summed in another order than in one process: some ulps of float64.
EXACT = 1e-12


def layers(count: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count))).double()


def batch(rows: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    named = model.named_parameters(remove_duplicate=False)
    return {name: None if p.grad is None else p.grad.clone() for name, p in named}


def assert_same(got: Any, expected: Any) -> None:
    """Compare this rank's values with those of one process."""
    for name, value in got.items():
        if expected[name] is None or value is None:
            assert expected[name] is None and value is None, name
        else:
            assert torch.allclose(value, expected[name], rtol=EXACT, atol=EXACT), f"{name}: {value} {expected[name]}"


def alone(model: nn.Module, *batches: tuple[Any, Any], loss: Any = F.mse_loss) -> list[Tensor]:
    """Run forward and backward in one process."""
    losses = []
    for x, y in batches:
        value = loss(model(*x) if isinstance(x, tuple) else model(x), y)
        value.backward()
        losses.append(value.detach())
    return losses


@pytest.mark.parametrize("microbatches", [1, 3, 8])
@pytest.mark.parametrize("name", FLUSHING)
def test_gradients_and_weights_are_those_of_one_process(comm: Any, name: Any, microbatches: int) -> None:
    """Two batches are accumulated, one of which leaves microbatches uneven or empty; then the weights are updated."""
    whole = layers(12)
    pipe = pipeline(layers(12), comm, schedule=name, microbatches=microbatches, loss=F.mse_loss)
    ours = torch.optim.AdamW(pipe.parameters(), lr=0.1)
    theirs = torch.optim.AdamW(whole.parameters(), lr=0.1)
    for step in range(3):
        batches = batch(16, step), batch(7, step + 10)
        expected = alone(whole, *batches)
        for (x, y), loss in zip(batches, expected, strict=True):
            got = pipe.step(x if comm.rank == pipe.pipe.first else None, y if comm.rank == pipe.pipe.last else None)
            torch.testing.assert_close(got, loss, rtol=EXACT, atol=0)
        assert_same(gradients_of(pipe), gradients_of(whole))
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
        assert_same(pipe.state_dict(), whole.state_dict())
    x, y = batch(9, 5)
    torch.testing.assert_close(pipe.evaluate(x, y), F.mse_loss(whole(x), y).detach(), rtol=EXACT, atol=0)
    torch.testing.assert_close(pipe.predict(x), whole(x).detach(), rtol=EXACT, atol=EXACT)
    assert pipe.gather_state_dict().keys() == whole.state_dict().keys()
    assert_same(pipe.gather_state_dict(), whole.state_dict())
    assert_same(ct.gather_state_dict(pipe), whole.state_dict())
    pipe.close()


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb_v"])
def test_activations_held_match_the_simulator(comm: Any, name: Any) -> None:
    pipe = pipeline(layers(8), comm, schedule=name, microbatches=8, loss=F.mse_loss)
    pipe.step(*batch(8))
    assert pipe.pipe.runner.peak == simulate(pipe.pipe.lowered).peak[comm.rank]
    pipe.close()


class Skipping(nn.Module):
    """A model with skips over several stages, integer and other inputs, several outputs, and a weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.second = nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)
        self.fourth = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 10, bias=False)
        self.head.weight = self.embed.weight
        self.shift: Tensor
        self.register_buffer("shift", torch.full((WIDTH,), 0.5))

    def forward(self, words: Tensor, weights: Tensor) -> Tensor:
        early = self.embed(words)
        x = torch.tanh(self.first(early)) * self.scale
        y = torch.tanh(self.second(x)) + self.shift
        z = torch.relu(self.third(y) + early)
        even = words % 2 == 0
        z = self.fourth(z) * weights + torch.where(even.unsqueeze(-1), x, y)
        out: Tensor = self.head(z)
        return out


def skipping() -> Skipping:
    torch.manual_seed(3)
    return Skipping().double()


@pytest.mark.parametrize("split", ["auto", "names"])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1", "interleaved"])
def test_skips_ties_and_other_values(comm: Any, name: Any, split: str) -> None:
    ranks = comm.size
    chunks = 2 if name == "interleaved" and ranks < 3 else 1
    places: Split = ["second", "third", "fourth"][: ranks * chunks - 1] if split == "names" else "auto"
    whole = skipping()
    pipe = pipeline(
        skipping(), comm, schedule=name, microbatches=4, loss=F.cross_entropy, split=places, stages=ranks * chunks
    )
    generator = torch.Generator().manual_seed(5)
    for _ in range(2):
        words = torch.randint(10, (8,), generator=generator)
        weights = torch.rand(8, 1, generator=generator, dtype=torch.float64)
        targets = torch.randint(10, (8,), generator=generator)
        (expected,) = alone(whole, ((words, weights), targets), loss=F.cross_entropy)
        got = pipe.step((words, weights) if comm.rank == 0 else None, targets)
        torch.testing.assert_close(got, expected, rtol=EXACT, atol=0)
        assert_same(gradients_of(pipe), gradients_of(whole))
    norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    torch.testing.assert_close(pipe.clip_grad_norm(0.1).double(), norm, rtol=1e-6, atol=0)
    # The factor is computed from the norm in float64 on both sides.
    for key, gradient in gradients_of(pipe).items():
        torch.testing.assert_close(gradient, gradients_of(whole).get(key), rtol=1e-6, atol=1e-12)
    pipe.close()


def test_several_values_between_layers(comm: Any) -> None:
    """Tuples are the next layer's arguments; None, numbers and integers are passed on."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, mask: Tensor, extra: Any = None, times: int = 1) -> Any:
            assert mask.dtype == torch.bool and not mask.requires_grad
            assert (extra is None) == (times == 1)
            return torch.where(mask, torch.sin(self.linear(x)), x), mask, {"seen": mask.sum()}, times + 1

    class Last(nn.Module):
        def forward(self, x: Tensor, mask: Tensor, extra: Any, times: int) -> Tensor:
            out: Tensor = x * times + extra["seen"]
            return out

    torch.manual_seed(0)
    model: list[nn.Module] = [*(Layer().double() for _ in range(4)), Last()]
    pipe = pipeline(model, comm, schedule="1f1b", microbatches=2, loss=F.mse_loss, weigh="rows")  # the loss counts rows
    x, y = batch(6)
    value: Any = (x, x > 0)
    losses = []
    for part in (slice(0, 3), slice(3, 6)):  # a microbatch's count differs from the batch's
        value = (x[part], x[part] > 0)
        for layer in model:
            value = layer(*value)
        losses.append(F.mse_loss(value, y[part]) / 2)
    sum(losses).backward()  # type: ignore[union-attr]
    expected = {f"{n}.{k}": g for n, layer in enumerate(model) for k, g in gradients_of(layer).items()}
    for layer in model:
        layer.zero_grad()
    got = pipe.step((x, x > 0), y)
    torch.testing.assert_close(got, sum(losses).detach(), rtol=EXACT, atol=0)  # type: ignore[union-attr]
    assert_same(gradients_of(pipe), expected)
    pipe.close()


@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
def test_layers_that_work_in_place_or_change_nothing(comm: Any, name: Any) -> None:
    def model() -> nn.Sequential:
        torch.manual_seed(0)
        kinds: list[nn.Module] = []
        for _ in range(8):
            kinds += [nn.ReLU(inplace=True), nn.Identity(), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)]
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), *kinds).double()

    whole, pipe = model(), pipeline(model(), comm, schedule=name, microbatches=8, loss=F.mse_loss)
    for step in range(2):
        x, y = batch(16, step)
        (expected,) = alone(whole, (x.clone(), y))
        torch.testing.assert_close(pipe.step(x, y), expected, rtol=EXACT, atol=0)
        torch.testing.assert_close(pipe.evaluate(x, y), expected, rtol=EXACT, atol=0)
        assert_same(gradients_of(pipe), gradients_of(whole))
    torch.testing.assert_close(pipe.predict(x), whole(x).detach(), rtol=EXACT, atol=EXACT)
    pipe.close()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex128])
def test_other_dtypes(comm: Any, dtype: torch.dtype) -> None:
    """Activations travel unchanged: the bits match one process that computes in microbatches."""

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).to(dtype)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).abs().square().mean()

    x, y = (value.to(dtype) for value in batch(4))
    whole, pipe = model(), pipeline(model(), comm, schedule="1f1b", microbatches=2, loss=loss)
    for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
        value = loss(whole(part), target)
        value.backward(torch.full_like(value, 0.5))
    pipe.step(x, y)
    for key, gradient in gradients_of(pipe).items():
        assert torch.equal(gradient, gradients_of(whole)[key])  # type: ignore[arg-type]
    pipe.close()


@pytest.mark.parametrize("checkpoint", ["none", "selective", "full"])
def test_recomputed_activations(comm: Any, checkpoint: Any) -> None:
    """Dropout is the same when a forward is recomputed."""
    results = []
    for how in ("none", checkpoint):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)) for _ in range(4))).double()
        pipe = pipeline(model, comm, schedule="1f1b", microbatches=4, loss=F.mse_loss, checkpoint=how)
        torch.manual_seed(7 + comm.rank)
        loss = pipe.step(*batch(8))
        results.append((loss, gradients_of(pipe)))
        pipe.close()
    assert torch.equal(results[0][0], results[1][0])
    assert_same(results[1][1], results[0][1])


@pytest.mark.parametrize("checkpoint", ["none", "full"])
def test_running_statistics(comm: Any, checkpoint: Any) -> None:
    """By microbatch: as in one process that trains on them in turn. By batch: as in one that sees all."""

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(4))
        ).double()

    x, y = batch(12)
    apart, first = model(), model()
    for part in x.chunk(3):
        apart(part)
    first[0](x)  # only the first layer's input matches one process: later ones are normalised by microbatch
    kind: Any
    for kind, expected in (("microbatch", apart.state_dict()), ("batch", first.state_dict())):
        pipe = pipeline(
            model(), comm, schedule="1f1b", microbatches=3, loss=F.mse_loss, checkpoint=checkpoint, batch_norm=kind
        )
        pipe.step(x, y)
        for key, value in pipe.state_dict().items():
            if "running" in key or "tracked" in key:
                if kind == "microbatch" or key.startswith("0."):
                    torch.testing.assert_close(value, expected[key], rtol=EXACT, atol=EXACT)
                elif "tracked" in key:
                    assert value == 1
        pipe.close()


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_activations_travel_encoded(comm: Any, codec: str) -> None:
    whole = layers(4).float()
    pipe = pipeline(layers(4).float(), comm, schedule="1f1b", microbatches=2, loss=F.mse_loss, codec=codec)
    x, y = (value.float() for value in batch(8))
    (expected,) = alone(whole, (x, y))
    got = pipe.step(x, y)
    torch.testing.assert_close(got, expected, rtol=0.05, atol=0)
    if comm.size > 1:
        assert got != expected, "nothing was encoded"
    pipe.close()


@pytest.mark.ranks(min=2)
def test_a_codec_for_each_direction(comm: Any) -> None:
    x, y = batch(8)
    count = 2 * comm.size
    plain = pipeline(layers(count), comm, microbatches=2, loss=F.mse_loss)
    exact = plain.step(x, y)
    several: tuple[tuple[dict[tuple[int, int], str | None], bool], ...] = (
        ({(0, 1): "int8"}, False),
        ({(1, 0): "int8", (0, 1): None}, True),
    )
    for codec, is_exact in several:
        pipe = pipeline(layers(count), comm, microbatches=2, loss=F.mse_loss, codec=codec)
        assert (pipe.step(x, y) == exact) == is_exact
        pairs = zip(pipe.parameters(), plain.parameters(), strict=True)
        same = all(a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad) for a, b in pairs)
        assert same == (is_exact and comm.rank > 0), "gradients come back with errors from stage 1 to stage 0 alone"
        pipe.close()
    plain.close()
    with pytest.raises(UsageError, match=r"no link connects the stages \(0, 7\); expected some of \(0, 1\)"):
        pipeline(layers(count), comm, microbatches=2, loss=F.mse_loss, codec={(0, 7): "int8"})


@pytest.mark.parametrize("kind", [nn.Sequential, nn.ModuleList, list])
def test_a_layer_listed_twice_is_called_twice(comm: Any, kind: Any) -> None:
    """It may repeat in one stage or in two: an activation, or a layer with weights, whose gradient is the sum."""

    def repeating() -> nn.Sequential:
        torch.manual_seed(0)
        double, act = nn.Linear(WIDTH, WIDTH), nn.Softplus()
        several = [nn.Linear(WIDTH, WIDTH) for _ in range(comm.size)]
        return nn.Sequential(double, act, act, double, *(layer for own in several for layer in (own, act)), double)

    whole = repeating().double()
    layers = repeating().double()
    pipe = pipeline(
        kind(layers) if kind is not nn.Sequential else layers, comm, microbatches=2, loss=F.mse_loss,
        split=[len(layers) - comm.size + 1] + [1] * (comm.size - 1),
    )  # fmt: skip
    x, y = batch(8)
    (expected,) = alone(whole, (x, y))
    torch.testing.assert_close(pipe.step(x, y), expected, rtol=EXACT, atol=0)
    theirs = gradients_of(whole)
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name if name in theirs else f"0.{name.split('.')[1]}"])
    pipe.close()


def test_a_function_chooses_the_cuts(comm: Any) -> None:
    def first_alone(model: Any) -> list[int]:
        assert isinstance(model, nn.Sequential)
        return [1] * (comm.size - 1) + [len(model) - comm.size + 1]

    pipe = pipeline(layers(6), comm, microbatches=2, loss=F.mse_loss, split=first_alone)
    assert len(list(pipe.parts[0].children())) == (1 if comm.rank < comm.size - 1 else 7 - comm.size)
    pipe.close()


@pytest.mark.parametrize("name", ["pipedream", "pipedream_2bw"])
def test_updates_while_the_pipeline_runs(comm: Any, name: Any) -> None:
    """As in one process that uses, for each microbatch and stage, the weights that the schedule prescribes."""
    from commlib.pipeline.schedule import Kind, make
    from commlib.pipeline.schedule.versions import versions

    microbatches, every = 8, comm.size if name == "pipedream_2bw" else 1
    pipe = pipeline(
        layers(comm.size), comm, schedule=name, microbatches=microbatches, loss=F.mse_loss,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.3, momentum=0.9),
    )  # fmt: skip
    schedule = make(name, comm.size, microbatches)
    used = versions(schedule)
    whole = layers(comm.size)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.3, momentum=0.9) for layer in whole]
    for step in range(2):
        x, y = batch(16, step)
        xs, ys = x.chunk(microbatches), y.chunk(microbatches)
        # All actions of all ranks in a valid order, on a stack of versions of each layer's weights.
        kept = [[{k: v.detach().clone() for k, v in layer.state_dict().items()}] for layer in whole]
        outs: dict[Any, Any] = {}
        order = simulate(schedule)
        actions = sorted(
            (span, stage, action)
            for stage, program in enumerate(order.lowered.schedule.programs)
            for span, action in zip(order.spans[stage], program, strict=True)
            if action.peer < 0
        )
        losses = []
        for _, stage, action in sorted(actions, key=lambda item: item[0][1]):
            layer, number = whole[stage], action.microbatch
            if action.kind is Kind.F:
                given = xs[number] if stage == 0 else outs[stage - 1, number][1].detach().requires_grad_()
                weights = {k: v.clone().requires_grad_() for k, v in kept[stage][used[stage, number][0]].items()}
                outs[stage, number] = given, torch.func.functional_call(layer, weights, (given,)), weights
            elif action.kind is Kind.B:
                given, out, weights = outs[stage, number]
                if stage == comm.size - 1:
                    loss = F.mse_loss(out, ys[number])
                    losses.append(loss.detach())
                    (loss / min(every, microbatches - number // every * every)).backward()
                else:
                    out.backward(outs[stage + 1, number][0].grad)
                for key, parameter in layer.named_parameters():
                    gradient = weights[key].grad
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            elif action.kind is Kind.STEP:
                optimizers[stage].step()
                optimizers[stage].zero_grad()
                kept[stage].append({k: v.detach().clone() for k, v in layer.state_dict().items()})
        got = pipe.step(x, y)
        torch.testing.assert_close(got, torch.stack(losses).mean(), rtol=EXACT, atol=0)
        assert_same(pipe.state_dict(), whole.state_dict())
    pipe.close()


def test_state_of_the_whole_model_is_loaded(comm: Any) -> None:
    whole = layers(6, seed=9)
    pipe = pipeline(layers(6), comm, schedule="1f1b", microbatches=2)
    pipe.load_state_dict(whole.state_dict())
    assert_same(pipe.state_dict(), whole.state_dict())
    with pytest.raises(RuntimeError, match=r"Unexpected key.*nothing\.weight"):
        pipe.load_state_dict({**whole.state_dict(), "nothing.weight": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="Missing key"):
        pipe.load_state_dict({})
    pipe.close()


@pytest.mark.parametrize("model", [lambda: layers(8), skipping], ids=["layers", "traced"])
def test_chosen_by_measured_costs(comm: Any, model: Any) -> None:
    """Every choice trains alike, and measuring the model does not change it."""
    whole = model()
    generator = torch.Generator().manual_seed(2)
    is_traced = isinstance(whole, Skipping)
    x: Any = batch(8)[0]
    y = batch(8)[1]
    if is_traced:
        x = torch.randint(10, (8,), generator=generator), torch.rand(8, 1, generator=generator, dtype=torch.float64)
        y = torch.randint(10, (8,), generator=generator)
    loss = F.cross_entropy if is_traced else F.mse_loss
    (expected,) = alone(whole, (x, y), loss=loss)
    several: tuple[dict[str, Any], ...] = {"schedule": "auto"}, {"schedule": "1f1b", "split": "time"}
    for options in several:
        example = tuple(part[:2] for part in x) if is_traced else x[:2]
        pipe = pipeline(
            model(), comm, microbatches=4, loss=loss, example=example if comm.rank == 0 else None, **options
        )
        assert ("simulated" in pipe.why) == (options["schedule"] == "auto")
        assert not any(parameter.grad is not None for parameter in pipe.parameters())
        torch.testing.assert_close(pipe.step(x, y), expected, rtol=EXACT, atol=0)
        assert_same(gradients_of(pipe), gradients_of(whole))
        pipe.close()
    with pytest.raises(UsageError, match="no schedule holds at most 1 bytes"):
        pipeline(model(), comm, schedule="auto", microbatches=4, loss=loss, example=example, memory=1)
    with pytest.raises(UsageError, match="pass example= on rank 0"):
        pipeline(model(), comm, schedule="auto", microbatches=4, loss=loss)


@pytest.mark.ranks(min=2)
def test_recomputation_counts_in_the_choice(comm: Any) -> None:
    def least(checkpoint: Any) -> int:
        with pytest.raises(UsageError, match="no schedule holds at most 1 bytes") as refused:
            pipeline(
                layers(8), comm, schedule="auto", microbatches=4, loss=F.mse_loss, checkpoint=checkpoint,
                example=batch(2)[0], memory=1,
            )  # fmt: skip
        result = re.search(r"the least is (\d+)", str(refused.value))
        assert result is not None
        return int(result[1])

    assert least("full") < least("none")


def test_slow_layers_get_stages_of_their_own(comm: Any) -> None:
    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            time.sleep(0.02)
            return x

    quick = [nn.Linear(WIDTH, WIDTH).double() for _ in range(3 * comm.size)]
    pipe = pipeline(
        [Slow(), *quick], comm, schedule="1f1b", split="time", microbatches=2, loss=F.mse_loss, example=batch(2)[0]
    )
    if comm.size > 1:
        assert (comm.rank == 0) == (not list(pipe.named_parameters()))  # parameters() then has an empty one
    pipe.close()


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
@pytest.mark.ranks(min=2)
def test_gradients_do_not_share_memory_with_messages(comm: Any, name: Any) -> None:
    """Autograd may use a received gradient as a weight's without a copy, but the next message reuses its memory."""

    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.w[None]

    def model() -> list[nn.Module]:
        torch.manual_seed(0)
        # Only one: for two in a row, torch lets both gradients share memory, in one process too.
        return [Shift(), *(nn.Linear(WIDTH, WIDTH).double() for _ in range(comm.size - 1))]

    whole = nn.Sequential(*model())
    split = [1] * comm.size
    pipe = pipeline(model(), comm, schedule=name, microbatches=1, loss=F.mse_loss, split=split)
    for step in range(4):
        (expected,) = alone(whole, batch(1, step))
        torch.testing.assert_close(pipe.step(*batch(1, step)), expected, rtol=EXACT, atol=0)
    assert_same(gradients_of(pipe), gradients_of(whole))
    pipe.close()


# Refusals


@pytest.mark.ranks(min=2)
def test_x_and_y_of_different_batches_are_refused_everywhere(comm: Any) -> None:
    pipe = pipeline(layers(4), comm, microbatches=2, loss=lambda output, target: output.sum() + target.sum())
    x, y = batch(8)
    x, y = (x, None) if comm.rank == 0 else (None, y[:6])  # type: ignore[assignment]
    with pytest.raises(UsageError, match=rf"8 on rank 0, 6 on rank {comm.size - 1}"):
        pipe.step(x, y if comm.rank == comm.size - 1 else None)
    pipe.close()


@pytest.mark.ranks(min=2)
def test_tied_weights_are_refused_where_stages_update_by_themselves(comm: Any) -> None:
    first = nn.Linear(WIDTH, WIDTH)
    model = [first, *(nn.Linear(WIDTH, WIDTH) for _ in range(comm.size))]
    model[-1].weight = first.weight
    with pytest.raises(UsageError, match="stages on several ranks share a weight, but schedule pipedream updates"):
        pipeline(model, comm, schedule="pipedream", microbatches=2, optimizer=lambda named: None)  # type: ignore[arg-type, return-value]


@pytest.mark.ranks(min=2)
def test_ranks_with_different_arguments_are_refused(comm: Any) -> None:
    with pytest.raises(MismatchError, match=r"2 microbatch.*on rank 0 but .*3 microbatch"):
        pipeline(layers(4), comm, microbatches=2 if comm.rank == 0 else 3)
    with pytest.raises(MismatchError, match=r"stage 0: 0.0.weight"):
        model = layers(4) if comm.rank else nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
        pipeline(model, comm, microbatches=2)


def test_invalid_arguments_are_refused(comm: Any) -> None:
    with pytest.raises(UsageError, match="layers cannot be cut into"):
        pipeline(layers(comm.size - 1), comm, microbatches=2) if comm.size > 1 else pipeline([], comm, microbatches=2)
    with pytest.raises(UsageError, match="unknown schedule 'f1b1'"):
        pipeline(layers(4), comm, microbatches=2, schedule="f1b1")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="checkpoint is 'all'"):
        pipeline(layers(4), comm, microbatches=2, checkpoint="all")  # type: ignore[arg-type]
    pipe = pipeline(layers(4), comm, microbatches=2)
    with pytest.raises(UsageError, match="a pipeline cannot be called"):
        pipe(batch(2)[0])
    if comm.rank == 0:
        with pytest.raises(UsageError, match="rank 0 has the first stage: pass x on it"):
            pipe.step(None, batch(2)[1])
    pipe.close()


@pytest.mark.ranks(min=2)
def test_a_loss_that_raises_ends_the_pipeline_everywhere(comm: Any) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        raise ZeroDivisionError("no rows")

    pipe = pipeline(layers(4), comm, microbatches=4, loss=loss)
    assert_a_failing_loss_is_reported(comm, lambda: pipe.step(*batch(8)))
    pipe.close()


def test_names_are_exported() -> None:
    assert ct.pipeline is pipeline
