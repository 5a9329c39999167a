"""Tables of kernels: each device has all kernels that are declared, with the declared parameters."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from commlib.kernels.cuda.table import CudaKernels
from commlib.kernels.host.table import HostKernels
from commlib.kernels.protocol import Kernels
from tests.late.kernels import LateKernels

DECLARED = {name: method for name, method in vars(Kernels).items() if inspect.isfunction(method) and name[0] != "_"}


@pytest.mark.parametrize("table", [HostKernels, CudaKernels])
def test_a_table_has_every_kernel_with_its_parameters(table: Any) -> None:
    assert len(DECLARED) > 30 and Kernels in table.__mro__
    for name, declared in DECLARED.items():
        kernel = getattr(table, name)
        assert kernel is not declared, f"{table.__name__} lacks {name}"
        assert inspect.signature(kernel) == inspect.signature(declared), name


def test_the_late_device_has_every_kernel() -> None:
    assert set(DECLARED) <= {name for name in vars(LateKernels) if name[0] != "_"}


def test_an_incomplete_table_cannot_be_created() -> None:
    """A missing kernel would return None, and not change its target."""

    class Incomplete(Kernels):
        pass

    with pytest.raises(TypeError, match="add_momentum"):
        Incomplete()  # type: ignore[abstract]


def test_a_gpu_kernel_is_one_frame_below_its_caller() -> None:
    """No table of functions that only pass their arguments on: each would cost a frame in every call."""
    launched: list[str] = []

    class Launcher:
        def launch(self, source: str, kernel: str, defines: Any, workers: int, *args: Any) -> None:
            frame = inspect.currentframe()
            assert frame is not None and frame.f_back is not None and frame.f_back.f_back is not None
            launched.append(frame.f_back.f_back.f_code.co_name)

        def scratch(self, nbytes: int) -> Any:
            raise NotImplementedError

        def read(self, memory: Any, dtype: Any) -> Any:
            raise NotImplementedError

    def caller() -> None:
        import numpy as np

        CudaKernels(Launcher()).widen(np.zeros(2, np.uint8), np.zeros(1, np.float32), False, False)

    caller()
    assert launched == ["caller"]
