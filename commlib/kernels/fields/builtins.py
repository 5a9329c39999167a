"""Fields of the functions that `kernels.host.builtins` calls: the `self` of their builtins."""

from __future__ import annotations

# The address of the machine code, the number of its arguments, and whether it runs with the GIL held.
ADDRESS, ARGUMENTS, HOLDS_LOCK, FUNCTION_FIELDS = range(4)
MOST_ARGUMENTS = 7
