"""Pool: memory of results returns with the last reference to it, and not before."""

from __future__ import annotations

import weakref

import numpy as np
import tensorflow as tf

from commlib.buffers.pool import Pool
from commlib_tensorflow._bridge import to_tensor

COUNT = 1 << 18


def test_free_memory_is_reused() -> None:
    pool = Pool()
    first = pool.empty((COUNT,), "float32")
    place = first.ctypes.data
    second = pool.empty((COUNT,), "float32")
    assert place % 64 == 0 and second.ctypes.data != place
    del first
    assert pool.empty((COUNT // 2, 4), "float16").ctypes.data == place


def test_a_tensor_or_a_variable_keeps_its_memory() -> None:
    pool = Pool()
    array = pool.empty((COUNT,), "float32")
    array[...] = 1
    tensor = to_tensor(array)
    variable = tf.Variable(tensor)
    variable.assign(tensor)
    part = tensor[:5]
    place = array.ctypes.data
    del array
    for holder in (tensor, variable):
        again = pool.empty((COUNT,), "float32")
        assert again.ctypes.data != place
        again[...] = 2
        np.testing.assert_array_equal(holder, 1)
    np.testing.assert_array_equal(part, 1)


def test_small_arrays_bypass_the_pool() -> None:
    pool = Pool()
    assert pool.empty((0, 3), "int8").shape == (0, 3)
    array = pool.empty((), "float64")
    assert array.shape == ()
    memory = weakref.ref(array.base)
    del array
    assert memory() is None  # not from the pool
