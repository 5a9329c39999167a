import pytest

from tests.again import mark_adapter

pytest_plugins = ["tests.multirank"]


@pytest.fixture(scope="session", autouse=True)
def initialised(comm):
    """Call init before anything else, as every script does."""


def pytest_collection_modifyitems(items):
    mark_adapter(
        items,
        "torch_adapter",
        every_mpi=("test_collectives.py", "test_optimizer.py"),
        every_number=("test_gradients_and_weights_are_those_of_one_process",),
    )
