"""A pytest plugin that puts the tensors of all tests on the late device: `-p tests.tensorflow_adapter.all_late`.

mpiexec -n 2 python -m pytest -p tests.tensorflow_adapter.all_late tests/tensorflow_adapter
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def all_late() -> Iterator[None]:
    """Treat CPU tensors as tensors of the late device, whose streams may wait for other ranks. Do not modify them."""
    from tests.late import LATE
    from tests.tensorflow_adapter.late import late

    place = late()
    LATE.has_signals = True
    yield
    place.close()
    assert LATE.queued > 0
    assert LATE.races == 0
