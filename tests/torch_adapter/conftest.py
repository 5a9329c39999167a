import pytest

pytest_plugins = ["tests.multirank"]


@pytest.fixture(scope="session", autouse=True)
def initialised(comm):
    """Call init before anything else, as every script does."""


SEEN = (
    "test_collectives.py",
    "test_optimizer.py",
)  # under every MPI; the rest says nothing new of it: adapters see the core alone


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "torch_adapter" and item.path.name not in SEEN:
            item.add_marker(pytest.mark.any_mpi)
