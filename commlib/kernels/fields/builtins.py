"""Fields of the functions that `kernels.host.builtins` calls: the `self` of their builtins."""

from __future__ import annotations

# The address of the machine code, the number of its arguments, and whether it runs with the GIL held.
ADDRESS, ARGUMENTS, HOLDS_LOCK, FUNCTION_FIELDS = range(4)
MOST_ARGUMENTS = 7

NEVER_CALLED = (
    "numba_gil_ensure",
    "numba_gil_release",
    "numba_unpickle",
    "numba_runtime_build_excinfo_struct",
    "numba_do_raise",
    "NRT_Free",
    "NRT_MemInfo_call_dtor",
)
"""Symbols of numba's run time to which machine code refers, for exceptions that no kernel raises."""
