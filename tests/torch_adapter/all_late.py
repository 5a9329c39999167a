"""A pytest plugin that puts the tensors of all tests on the late device: `-p tests.torch_adapter.all_late`.

mpiexec -n 2 python -m pytest -p tests.torch_adapter.all_late tests/torch_adapter
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def all_late() -> Iterator[None]:
    """Treat CPU tensors as tensors of the late device. No test may modify a tensor while the device reads it."""
    from tests.late import LATE
    from tests.torch_adapter.late import late

    place = late()
    yield
    place.close()
    assert LATE.queued > 0
    assert LATE.races == 0
