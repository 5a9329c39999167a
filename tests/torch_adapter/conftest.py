import pytest

pytest_plugins = ["tests.multirank"]


@pytest.fixture(scope="session", autouse=True)
def initialised(comm):
    """Call init before anything else, as every script does."""
