import pytest
import torch

from tests.plugins.again import leaves_out, mark_adapter

pytest_plugins = ["tests.plugins.multirank"]


@pytest.fixture(scope="session", autouse=True)
def initialised(comm):
    """Call init before anything else, as every script does."""


@pytest.fixture(autouse=True)
def seeded():
    """Give all ranks the same random numbers, whatever tests ran before."""
    torch.manual_seed(0)


EVERY_MPI = ("test_collectives.py", "test_optimizer.py")
EVERY_NUMBER = ("test_gradients_and_weights_are_those_of_one_process",)


def pytest_ignore_collect(collection_path, config):
    return leaves_out(config, collection_path, every_mpi=EVERY_MPI, every_number=EVERY_NUMBER) or None


def pytest_collection_modifyitems(items):
    mark_adapter(items, "torch_adapter", every_mpi=EVERY_MPI, every_number=EVERY_NUMBER)
