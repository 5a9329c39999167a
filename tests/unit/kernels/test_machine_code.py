"""Machine code: kernels called without their compiler."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import commlib
from commlib.buffers.views import address_of
from commlib.kernels import machine_code, precompile
from commlib.kernels.machine_code import entry_point

FUNCTIONS = "entry_point", "address", "code_address"


def test_a_builtin_takes_its_number_of_ints():
    function = entry_point("node.all_equal")
    numbers = np.array([5, 5])
    table = np.array([address_of(numbers), 2, address_of(numbers)])
    assert function(address_of(table)) == 1
    numbers[1] = 6
    assert function(address_of(table)) == 0
    for arguments in ((), (1, 2)):
        with pytest.raises(TypeError):
            function(*arguments)
    with pytest.raises(TypeError):
        function("address")
    with pytest.raises(OverflowError):
        function(1 << 64)


def test_without_builtins_ctypes_calls_the_code(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine_code, "HAS_BUILTINS", False)
    entry_point.cache_clear()
    try:
        source, target = np.arange(5), np.zeros(5, np.int64)
        entry_point("stream.stream_copy", 3)(address_of(target), address_of(source), source.nbytes)
        assert (target == source).all()
    finally:
        entry_point.cache_clear()


def test_a_kernel_of_arrays_is_refused():
    with pytest.raises(TypeError, match=r"takes only numbers"):
        machine_code.address("draw.draw")


def test_every_entry_point_is_compiled_ahead():
    """Else each job compiles it at its first start."""
    used = set()
    for path in Path(commlib.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in FUNCTIONS:
                used |= {one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)}
    assert used <= set(precompile.ENTRY_POINTS)
    assert set(precompile.ENTRY_POINTS) - used == {"builtins.call"}


def test_a_group_starts_without_the_compiler():
    """numba takes 0.3 s of a core to import, on every rank."""
    program = "import sys, commlib.communicator, commlib.world\nprint('numba' in sys.modules)"
    for _ in range(2):  # the first one may have to compile
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=110, check=True)
    assert done.stdout == "False\n"
