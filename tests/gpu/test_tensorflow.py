"""TensorFlow's tensors on a GPU: the bodies that tests/tensorflow_adapter/test_late.py runs on the late device.

Where TensorFlow finds no GPU, its CPU tensors are on CuPy's stand-in: all runs but `commlib_tensorflow.devices.Cuda`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from commlib.dtypes import DTYPES

tf = pytest.importorskip("tensorflow")

from tests.tensorflow_adapter import device_verbs  # noqa: E402
from tests.tensorflow_adapter.late import HostTensors  # noqa: E402

GPUS = tf.config.list_physical_devices("GPU")

for found in GPUS:  # else it takes all memory
    tf.config.experimental.set_memory_growth(found, True)


class OnGpu:
    """Where the bodies put tensors."""

    device = "GPU"

    def put(self, values: Any) -> Any:
        with tf.device("GPU:0"):
            return tf.identity(tf.constant(values))


@pytest.fixture
def place(gpu: Any) -> Iterator[Any]:
    if GPUS and gpu.is_real:
        yield OnGpu()
        return
    there = HostTensors(gpu.device)
    yield there
    there.close()
    assert there.taken


@pytest.mark.parametrize("dtype", DTYPES)
def test_verbs(comm: Any, place: Any, dtype: str) -> None:
    device_verbs.verbs(comm, place, dtype)


def test_results_in_use(comm: Any, place: Any) -> None:
    device_verbs.results_in_use(comm, place)
