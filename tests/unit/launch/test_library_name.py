"""Libraries under other names: the loader accepts the empty library in place of the library it looks for."""

from __future__ import annotations

import ctypes
import os

import pytest

from commlib.launch.library_name import load_as


def test_a_program_linked_to_the_other_name_finds_its_functions():
    name = f"libcommlib-test-{os.getpid()}.so.12"
    with pytest.raises(OSError):
        ctypes.CDLL(name)
    load_as(name, "libm.so.6")
    library = ctypes.CDLL(name)  # by name: there is no such file
    library.cos.restype, library.cos.argtypes = ctypes.c_double, [ctypes.c_double]
    assert library.cos(0.0) == 1.0


def test_a_missing_library_is_an_error():
    with pytest.raises(OSError, match=r"libcommlib-nowhere\.so\.1"):
        load_as("libcommlib-other.so.1", "libcommlib-nowhere.so.1")
