"""TensorFlow's tensors on a GPU: the bodies that tests/tensorflow_adapter/test_late*.py run on the late device.

Where TensorFlow finds no GPU, its CPU tensors are on CuPy's stand-in: all runs but `commlib_tensorflow.devices.Cuda`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

import commlib
from commlib.dtypes import DTYPES
from commlib.expert import Experts

tf = pytest.importorskip("tensorflow")

from tests.gpu.ways import EACH_WAY  # noqa: E402
from tests.tensorflow_adapter import device_gradients as gradients  # noqa: E402
from tests.tensorflow_adapter import device_layers as layers  # noqa: E402
from tests.tensorflow_adapter import device_verbs  # noqa: E402
from tests.tensorflow_adapter import test_moe as experts  # noqa: E402
from tests.tensorflow_adapter.late import HostTensors  # noqa: E402
from tests.tensorflow_adapter.oracle import MODES  # noqa: E402

each_mode = pytest.mark.parametrize("mode", MODES)
GPUS = tf.config.list_physical_devices("GPU")

for device in GPUS:  # else it takes all memory
    tf.config.experimental.set_memory_growth(device, True)
    tf.config.experimental.enable_tensor_float_32_execution(False)  # which has 10 bits after the point


class OnGpu:
    """The place where the bodies put tensors."""

    device = "GPU"

    def put(self, values: Any) -> Any:
        with tf.device("GPU:0"):
            return tf.identity(tf.constant(values))

    def host(self) -> AbstractContextManager[Any]:
        """Create tensors on the host within a `with`."""
        scope: AbstractContextManager[Any] = tf.device("CPU:0")
        return scope


@pytest.fixture
def place(gpu: Any) -> Iterator[Any]:
    if GPUS and gpu.is_real:
        yield OnGpu()
        return
    tensors = HostTensors(gpu.device)
    yield tensors
    tensors.close()
    assert tensors.taken or commlib.world().size == 1  # one rank may have nothing to do


@EACH_WAY
@pytest.mark.parametrize("dtype", DTYPES)
def test_verbs(comm: Any, place: Any, dtype: str) -> None:
    device_verbs.verbs(comm, place, dtype)


@EACH_WAY
def test_gradients_of_verbs(comm: Any, place: Any) -> None:
    device_verbs.gradients(comm, place)


@EACH_WAY
def test_results_in_use(comm: Any, place: Any) -> None:
    device_verbs.results_in_use(comm, place)


@EACH_WAY
def test_inputs_in_use(comm: Any, place: Any) -> None:
    device_verbs.inputs_in_use(comm, place)


@EACH_WAY
@pytest.mark.ranks(max=3)
def test_traced_verbs(comm: Any, place: Any) -> None:
    gradients.traced_verbs(comm, place)


@EACH_WAY
@pytest.mark.parametrize("name", ["top-2", "parts"])
def test_experts(comm: Any, place: Any, name: str) -> None:
    for compiled in (False, True):
        experts.check(comm, Experts(6, hidden=10, **experts.OPTIONS[name]), compiled=compiled)


@EACH_WAY
@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_moves_and_sequences(comm: Any, place: Any, traced: bool) -> None:
    layers.moves(comm, place, traced)
    for method in ("ring", "all_to_all"):
        layers.sequences(comm, place, method, traced)


@EACH_WAY
@pytest.mark.ranks(min=2)
def test_divided_layers_and_stages(comm: Any, place: Any) -> None:
    layers.divided_layers(comm, place)
    layers.stages(comm, place)


@pytest.fixture
def world() -> Any:
    """All ranks, whose operations by name take any path."""
    import commlib

    return commlib.init()


@each_mode
def test_training_equals_one_process(world: Any, place: Any, mode: str) -> None:
    gradients.tape(world, mode, groups=3, overlap=True)


@each_mode
@pytest.mark.parametrize("dtype", gradients.FLOATS)
def test_gradients_of_every_dtype(world: Any, place: Any, mode: str, dtype: str) -> None:
    gradients.dtypes(world, place, mode, dtype)


@each_mode
def test_gradients_that_stay_referenced(world: Any, place: Any, mode: str) -> None:
    gradients.kept(world, place, mode)


@each_mode
def test_sparse_gradients(world: Any, place: Any, mode: str) -> None:
    for as_dense in (False, True):
        gradients.sparse(world, mode, as_dense)


def test_gradients_on_some_ranks_only(world: Any, place: Any) -> None:
    gradients.missing(world, place)


def test_fit(world: Any, place: Any) -> None:
    gradients.fit(world)


@each_mode
def test_operations_by_name(world: Any, place: Any, mode: str) -> None:
    gradients.by_name(world, place, mode)


@each_mode
def test_compression(world: Any, place: Any, mode: str) -> None:
    import commlib_tensorflow as ct

    for compression in (ct.Compression.fp16, ct.Compression.bf16, "int8"):
        gradients.compressed(world, place, mode, compression)
