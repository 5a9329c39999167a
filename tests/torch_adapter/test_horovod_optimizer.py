"""DistributedOptimizer with Horovod's options: P ranks train like one process with the whole batch."""

import copy
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import commlib_torch as hvd
from commlib.data_parallel.options import Options
from commlib.errors import MismatchError, UsageError
from commlib_torch import WrappedOptimizer

from .oracle import assert_close, assert_same_everywhere, batch, gradients_of, loss_of, mine, model, parameters_of

TINY = 1e-4
EXACT = 1e-11


class Halves:
    """A lossless user-defined compressor: it halves every value and sends [n, 1]."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor / 2).reshape(-1, 1), tensor.shape

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.reshape(ctx) * 2


# Options, and the allowed difference from training in one process.
OPTIONS: dict[str, tuple[dict[str, Any], float]] = {
    "positional": ({}, EXACT),
    "sum": ({"op": hvd.Sum}, EXACT),
    "sum, compressed": ({"op": hvd.Sum, "compression": Halves()}, EXACT),
    "fp16": ({"compression": hvd.Compression.fp16}, 1e-3),
    "bf16": ({"compression": hvd.Compression.bf16}, 1e-2),
    "own compressor": ({"compression": Halves()}, EXACT),
    "predivide": ({"gradient_predivide_factor": 4.0}, EXACT),
    "predivide, fp16": ({"gradient_predivide_factor": 4.0, "compression": hvd.Compression.fp16}, 1e-3),
    "predivide, own": ({"gradient_predivide_factor": 4.0, "compression": Halves()}, EXACT),
    "groups": ({"groups": 2}, EXACT),
    "many groups": ({"groups": 100}, EXACT),
    "groups, fp16": ({"groups": 2, "compression": hvd.Compression.fp16}, 1e-3),
    "sparse as dense": ({"sparse_as_dense": True}, EXACT),
}


def wrap(network: nn.Module, overlap: bool | None = None, **options: Any) -> Any:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.5)
    return hvd.DistributedOptimizer(
        optimizer, network.named_parameters(), **options, bucket_cap_mib=TINY, overlap=overlap
    )


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("kind", OPTIONS)
def test_options(comm: Any, kind: str, overlap: bool) -> None:
    options, tolerance = OPTIONS[kind]
    scale = comm.size if options.get("op") == hvd.Sum else 1
    network, alone = model(), model()
    optimizer = wrap(network, overlap, **options)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.5)
    for step in range(4):
        optimizer.zero_grad(set_to_none=step != 2)
        loss_of(network, mine(comm, batch(comm, step))).backward()
        plain.zero_grad()
        (scale * loss_of(alone, batch(comm, step))).backward()
        assert_close(gradients_of(network), gradients_of(alone), tolerance * scale)  # final when backward returns
        optimizer.step()
        plain.step()
    assert_close(parameters_of(network), parameters_of(alone), tolerance * scale)
    assert_same_everywhere(comm, parameters_of(network))


@pytest.mark.ranks(min=2)
def test_compression_does_round(comm: Any) -> None:
    """The test above can fail: the received values have been float16."""
    network = model()
    optimizer = wrap(network, compression=hvd.Compression.fp16)
    loss_of(network, mine(comm, batch(comm))).backward()
    assert optimizer.statistics.reductions == 1
    first = next(network.parameters()).grad
    assert first is not None and first.dtype == torch.float64
    assert torch.equal(first, first.half().double())


@pytest.mark.parametrize("kind", ["fp16", "own compressor", "predivide", "groups", "sum, compressed"])
def test_accumulation(comm: Any, kind: str) -> None:
    """Several passes, a pass without reduction, a gradient kept by user code, and a pass after the reduction."""
    options, tolerance = OPTIONS[kind]
    scale = comm.size if options.get("op") == hvd.Sum else 1
    network, alone = model(), model()
    optimizer = wrap(network, **options, backward_passes_per_step=2)
    for step in range(5):
        if step == 4:
            optimizer.set_backward_passes_per_step(1)
        loss_of(network, mine(comm, batch(comm, step))).backward()
        (scale * loss_of(alone, batch(comm, step))).backward()
        if step in (1, 3, 4):
            assert_close(gradients_of(network), gradients_of(alone), 10 * tolerance)
    if comm.size > 1:
        assert optimizer.statistics.reductions == 3
    with optimizer.no_sync():
        loss_of(network, mine(comm, batch(comm, 5))).backward()
    (scale * loss_of(alone, batch(comm, 5))).backward()
    optimizer.synchronize()
    assert_close(gradients_of(network), gradients_of(alone), 10 * tolerance)


@pytest.mark.parametrize("kind", ["fp16", "own compressor", "predivide", "groups"])
def test_unused_parameters(comm: Any, kind: str) -> None:
    """One parameter is used on rank 0 only, and one on no rank, which leaves it without a gradient."""
    options, tolerance = OPTIONS[kind]
    parts = nn.ModuleList([nn.Linear(2, 1, bias=False).double() for _ in range(3)])
    with torch.no_grad():
        for parameter in parts.parameters():
            parameter.fill_(1.0)
    optimizer = wrap(parts, True, **options)
    x = torch.ones(1, 2, dtype=torch.float64)
    for _ in range(2):
        optimizer.zero_grad()
        (parts[0](x) + (parts[1](x) if comm.rank == 0 else 0)).sum().backward()
        assert_close(gradients_of(parts), [torch.ones(1, 2).double(), x / comm.size, None], tolerance)
        optimizer.step()
    assert_same_everywhere(comm, parameters_of(parts))


def test_clipping_as_with_horovod(comm: Any) -> None:
    """Call synchronize, clip, and step without another reduction; or make no such call at all."""
    results = []
    for kind in ("horovod", "plain", "reference"):
        network = model()
        plain = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.5)
        optimizer: Any = plain if kind == "reference" else wrap(network)
        for step in range(3):
            optimizer.zero_grad()
            data = batch(comm, step)
            loss_of(network, data if kind == "reference" else mine(comm, data)).backward()
            if kind == "horovod":
                optimizer.synchronize()
            nn.utils.clip_grad_norm_(network.parameters(), 0.05)
            if kind == "horovod":
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        if kind != "reference" and comm.size > 1:
            assert optimizer.statistics.reductions == 3
        results.append(parameters_of(network))
    assert_close(results[0], results[1], 0)
    assert_close(results[0], results[2], EXACT)


@pytest.mark.ranks(min=2)
def test_a_step_that_skips(comm: Any) -> None:
    """Normally step() reduces the gradients left by no_sync; with skip_synchronize, every rank steps alone."""
    network = model()
    optimizer = wrap(network)
    with optimizer.no_sync():
        loss_of(network, mine(comm, batch(comm))).backward()
    with optimizer.skip_synchronize():
        optimizer.step()
    assert optimizer.statistics.reductions == 0
    assert len({str(p) for p in comm.all_gather_object(str(parameters_of(network)))}) == comm.size


@pytest.mark.parametrize("kind", ["fp16", "own compressor", "positional"])
def test_gradient_scaler(comm: Any, kind: str) -> None:
    """If one rank overflows, all ranks skip the step and lower the scale."""
    network = model(dtype=torch.float32)
    optimizer = wrap(network, **OPTIONS[kind][0])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        before = parameters_of(network)
        overflow = float("inf") if step == 1 and comm.rank == comm.size - 1 else 1.0
        optimizer.zero_grad()
        scaler.scale(loss_of(network, mine(comm, batch(comm, step, torch.float32))) * overflow).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        assert (step == 1) == all(torch.equal(a, b) for a, b in zip(before, parameters_of(network), strict=True))
    assert scaler.get_scale() == 512.0
    assert_same_everywhere(comm, parameters_of(network))


def adasum(parts: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """The definition: combine neighbours, then pairs of neighbours; ranks beyond a power of two join the first ones."""
    power = 1 << (len(parts).bit_length() - 1)

    def pair(a: Any, b: Any) -> Any:
        return (1 - a @ b / (2 * (a @ a))) * a + (1 - a @ b / (2 * (b @ b))) * b

    level = [pair(parts[i], parts[power + i]) if power + i < len(parts) else parts[i] for i in range(power)]
    while len(level) > 1:
        level = [pair(level[i], level[i + 1]) for i in range(0, len(level), 2)]
    return np.asarray(level[0])


@pytest.mark.parametrize("compression", [hvd.Compression.none, Halves()])
def test_adasum(comm: Any, compression: Any) -> None:
    """Adasum combines the ranks' own steps per tensor."""
    network = model()
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.Adam(network.parameters(), lr=0.01), network.named_parameters(), compression, op=hvd.Adasum
    )
    replicas = [model() for _ in range(comm.size)]
    plain = [torch.optim.Adam(replica.parameters(), lr=0.01) for replica in replicas]
    for step in range(3):
        optimizer.zero_grad()
        loss_of(network, mine(comm, batch(comm, step))).backward()
        optimizer.synchronize()
        optimizer.step()
        starts = [parameters_of(replica) for replica in replicas]
        for rank, (replica, its) in enumerate(zip(replicas, plain, strict=True)):
            inputs, targets = batch(comm, step)
            rows = slice(4 * rank, 4 * rank + 4)
            its.zero_grad()
            loss_of(replica, (inputs[rows], targets[rows])).backward()
            its.step()
        for index, start in enumerate(starts[0]):
            ends = [list(replica.parameters())[index].detach() for replica in replicas]
            moved = adasum([(end - start).reshape(-1).numpy() for end in ends])
            for end in ends:
                end.copy_(start + torch.from_numpy(moved).reshape(start.shape))
    assert_close(parameters_of(network), parameters_of(replicas[0]), 1e-9)
    assert_same_everywhere(comm, parameters_of(network))
    with pytest.raises(UsageError, match="Adasum"):
        optimizer.skip_synchronize()
    assert type(pickle.loads(pickle.dumps(optimizer))) is torch.optim.Adam


def norm_of(network: nn.Module) -> Tensor:
    gradients = [parameter.grad.reshape(-1) for parameter in network.parameters() if parameter.grad is not None]
    norm: Tensor = torch.cat(gradients).norm()
    return norm


def test_adasum_has_the_methods_of_other_optimizers(comm: Any) -> None:
    network = model()
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(network.parameters(), lr=0.1), op=hvd.Adasum)
    promised = {name for kind in WrappedOptimizer.__mro__ for name in vars(kind) if not name.startswith("_")}
    assert len(promised) > 10 and not promised - {"step"} - set(dir(type(optimizer)))
    before: Any = optimizer.report
    assert before is None
    with optimizer.no_sync():
        loss_of(network, mine(comm, batch(comm))).backward()
    norm = norm_of(network)
    assert torch.allclose(optimizer.clip_grad_norm(norm.item() / 2).to(norm), norm)
    assert torch.allclose(norm_of(network), norm / 2)
    optimizer.step()
    nbytes = sum(parameter.nbytes for parameter in network.parameters())
    assert optimizer.report.step == 1 and optimizer.report.sent_bytes == 2 * (comm.size - 1) * nbytes // comm.size
    assert 0 < optimizer.exposed_seconds == optimizer.report.exposed_seconds < optimizer.report.seconds
    assert optimizer.statistics.reductions == 1 and optimizer.compression_choice == "none: as requested"
    with pytest.raises(UsageError, match="reducer: with op=Adasum, steps are combined"):
        optimizer.reducer  # noqa: B018
    optimizer.close()
    loss_of(network, mine(comm, batch(comm))).backward()
    optimizer.step()
    assert optimizer.statistics.reductions == 1
    with pytest.raises(UsageError, match=r"compression with op=Adasum must be .* got 'fp16': pass Compression.fp16"):
        hvd.DistributedOptimizer(torch.optim.SGD(model().parameters(), lr=0.1), compression="fp16", op=hvd.Adasum)


def test_adasum_where_a_rank_has_no_gradient(comm: Any) -> None:
    network = model()
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(network.parameters(), lr=0.1), op=hvd.Adasum)
    if comm.rank == 0:
        loss_of(network, mine(comm, batch(comm))).backward()
    optimizer.step()
    alone = model()
    loss_of(alone, (batch(comm)[0][:4], batch(comm)[1][:4])).backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    assert_close(parameters_of(network), parameters_of(alone), EXACT)  # the others contribute nothing


def test_groups_share_buckets(comm: Any) -> None:
    """A group is one bucket, whatever its size; other parameters are bucketed as usual."""
    network = model()
    parameters = list(network.parameters())
    optimizer = wrap(network, groups=[[parameters[0], parameters[5]], parameters[2:4]])
    buckets = [set(bucket.parameters) & set(range(6)) for bucket in optimizer.reducer.buckets]
    assert {0, 5} in buckets and {2, 3} in buckets
    assert sorted(index for bucket in buckets for index in bucket) == list(range(6))
    loss_of(network, mine(comm, batch(comm))).backward()
    alone = model()
    loss_of(alone, batch(comm)).backward()
    assert_close(gradients_of(network), gradients_of(alone), EXACT)


def test_old_name_of_groups(comm: Any) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = wrap(model(), num_groups=2)
    assert [warning.category for warning in caught] == [DeprecationWarning]
    assert len(optimizer.reducer.groups) == 2


def test_load_state_dict_and_copies(comm: Any) -> None:
    network = model()
    optimizer = wrap(network, compression=hvd.Compression.fp16)
    loss_of(network, mine(comm, batch(comm))).backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    weights = copy.deepcopy(network.state_dict())
    ends = []
    for _ in range(2):
        network.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(saved))
        optimizer.zero_grad()
        loss_of(network, mine(comm, batch(comm, 1))).backward()
        optimizer.step()
        ends.append(parameters_of(network))
    assert_close(ends[0], ends[1], 0)
    assert type(copy.deepcopy(optimizer)) is torch.optim.SGD


def test_add_param_group_keeps_the_options(comm: Any) -> None:
    network = model()
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(network[:2].parameters(), lr=0.1), compression=hvd.Compression.fp16
    )
    optimizer.set_backward_passes_per_step(2)
    optimizer.add_param_group({"params": list(network[2:].parameters())})
    assert optimizer.reducer.options == Options(compression=hvd.Compression.fp16, passes_per_step=2)


def test_invalid_options_are_refused(comm: Any) -> None:
    """The cases in which Horovod raises ValueError."""
    network = model()
    parameters = list(network.parameters())

    def refuse(message: str, named: Any = None, **options: Any) -> None:
        with pytest.raises(ValueError, match=message):
            hvd.DistributedOptimizer(torch.optim.SGD(network.parameters(), lr=0.1), named, **options)

    refuse("two parameters are named 'w'", [("w", parameter) for parameter in parameters])
    refuse("lacks parameters", [("w", parameters[0])])
    refuse("must be .name, parameter. pairs", parameters)
    refuse("op must be one of mean, sum, adasum", op=hvd.Max)
    refuse("needs op=Average", op=hvd.Sum, gradient_predivide_factor=2.0)
    refuse("must be a positive number", gradient_predivide_factor=0.0)
    refuse("Adasum takes neither", op=hvd.Adasum, gradient_predivide_factor=2.0)
    refuse("non-negative number or a list", groups=-1)
    refuse("non-negative number or a list", groups="all")
    refuse("non-negative number or a list", groups=parameters)
    refuse("must consist of tensors", groups=[["0.weight"]])
    refuse("appear only once", groups=[parameters[:2], parameters[1:]])
    refuse("not a parameter of the optimizer", groups=[[torch.ones(1)]])
    refuse("one of them", ranks=comm, process_set=hvd.global_process_set)
    refuse("process_set= instead of ranks=", ranks=comm, compression=Halves())
    optimizer = wrap(network)
    with pytest.raises(ValueError, match="at least 1"):
        optimizer.set_backward_passes_per_step(0)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    "odd",
    [
        {"compression": hvd.Compression.fp16}, {"op": hvd.Sum}, {"groups": 2}, {"gradient_predivide_factor": 2.0},
        {"sparse_as_dense": True}, {"backward_passes_per_step": 2},
    ],
    ids=str,
)  # fmt: skip
def test_ranks_with_different_options_are_refused(comm: Any, odd: dict[str, Any]) -> None:
    with pytest.raises(MismatchError, match="data-parallel parameters"):
        wrap(model(), **(odd if comm.rank == comm.size - 1 else {}))
