import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow is imported
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import keras
import pytest
import tensorflow as tf

from tests.plugins.again import leaves_out, mark_adapter

# Ranks are the parallelism here, and 4 ranks compete with every additional thread.
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)

pytest_plugins = ["tests.plugins.multirank"]


@pytest.fixture(scope="session", autouse=True)
def initialised(comm):
    """Call init before anything else, as every script does."""


@pytest.fixture(autouse=True)
def seeded():
    """Give all ranks the same random numbers, whatever tests ran before."""
    keras.utils.set_random_seed(0)


@pytest.fixture
def mixed_float16():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy(before)


EVERY_MPI = ("test_collectives.py", "test_gradient_tape.py")
EVERY_NUMBER = ("test_gradients_and_weights_are_those_of_one_process",)


def pytest_ignore_collect(collection_path, config):
    return leaves_out(config, collection_path, every_mpi=EVERY_MPI, every_number=EVERY_NUMBER) or None


def pytest_collection_modifyitems(items):
    mark_adapter(items, "tensorflow_adapter", every_mpi=EVERY_MPI, every_number=EVERY_NUMBER)
