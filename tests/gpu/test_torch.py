"""PyTorch's tensors on a GPU: the bodies that tests/torch_adapter/test_late.py runs on the late device.

Where PyTorch finds no GPU, its CPU tensors are on CuPy's stand-in: all runs but `commlib_torch.devices.Cuda`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import commlib_torch  # noqa: E402
from tests.cuda import standin  # noqa: E402
from tests.torch_adapter import device_gradients, device_layers, device_training, device_verbs, values  # noqa: E402
from tests.torch_adapter.late import HostStream, HostTensors  # noqa: E402
from tests.torch_adapter.place import Place  # noqa: E402

# The core tests what is between the GPUs.
pytestmark = pytest.mark.parametrize("comm", ["peers", "staged"], indirect=True)


class OnGpu:
    """See `tests.torch_adapter.place.Place`. Tensors put there arrive late: products before the copy are slow."""

    device = name = "cuda"

    def put(self, values: Any) -> Any:
        result = torch.empty(values.shape, dtype=values.dtype, device="cuda")
        source = values.cuda()
        x = torch.ones(2048, 2048, device="cuda")
        for _ in range(5):
            x = x @ x / 2048
        result.copy_(source)
        return result

    def host(self) -> nullcontext[None]:
        return nullcontext()


@pytest.fixture(params=["default stream", "own stream"])
def place(request: pytest.FixtureRequest, gpu: Any) -> Iterator[Place]:
    """A GPU, with torch on its default stream or on another one."""
    is_own = request.param == "own stream"
    if torch.cuda.is_available() and gpu.is_real:
        torch.cuda.set_device(gpu.device.index)
        with torch.cuda.stream(torch.cuda.Stream()) if is_own else nullcontext():
            yield OnGpu()
            torch.cuda.current_stream().synchronize()
        return
    if is_own:
        pytest.skip("PyTorch finds no GPU, so it has no streams")
    raw, host = standin.Stream(), HostStream()
    raw.late = standin.Stream.known[raw.ptr] = host  # type: ignore[assignment]
    tensors = HostTensors(gpu.device, gpu.device.existing(raw.ptr))
    yield tensors
    tensors.close()


@pytest.mark.parametrize("dtype", values.ALL, ids=str)
def test_verbs(comm: Any, place: Place, dtype: Any) -> None:
    device_verbs.reductions(comm, place, dtype)
    device_verbs.movement(comm, place, dtype)


def test_every_form_of_tensor(comm: Any, place: Place) -> None:
    for form in values.FORMS:
        device_verbs.reductions(comm, place, torch.bfloat16, form)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("how", ["DistributedOptimizer", "DataParallel"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_trains_exactly(comm: Any, place: Place, how: str, overlap: bool, set_to_none: bool) -> None:
    device_training.trains_exactly(comm, place, how, overlap=overlap, set_to_none=set_to_none)


@pytest.mark.parametrize("compression", ["fp16", "int8", "sign", "topk:ratio=0.1"])
def test_compresses(comm: Any, place: Place, compression: str) -> None:
    device_gradients.compresses(comm, place, compression)


def test_compresses_by_low_rank(comm: Any, place: Place) -> None:
    device_gradients.compresses(comm, place, "powersgd:rank=2", near=1e-3)  # products are added up in another order


def test_parameters_on_host_and_device(comm: Any, place: Place) -> None:
    if isinstance(place, HostTensors):
        place.is_there = lambda tensor: tensor.dtype != torch.float64
    device_training.host_and_device(comm, place)


MODULES = device_verbs, device_training, device_gradients, device_layers


@pytest.mark.parametrize("body", [body for module in MODULES for body in module.BODIES])
def test_body(comm: Any, place: Place, body: Any) -> None:
    body(comm, place)


def test_a_one_bit_optimizer(comm: Any, place: Place) -> None:
    """It updates host parameters; a GPU's become the same, to the last bit."""
    host = torch.nn.Parameter(torch.arange(300.0))
    on_gpu = torch.nn.Parameter(place.put(host.detach().clone()))
    how = {"lr": 0.1, "freeze_step": 2, "ranks": comm, "compress_within_node": True}
    optimizers = [commlib_torch.OneBitAdam([parameter], **how) for parameter in (host, on_gpu)]
    for step in range(4):
        gradient = torch.randn(300, generator=torch.Generator().manual_seed(10 * step + comm.rank))
        host.grad, on_gpu.grad = gradient.clone(), place.put(gradient)
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(on_gpu.detach().cpu(), host.detach())
        assert on_gpu.device.type == place.device
