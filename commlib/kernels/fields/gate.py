"""Fields of gates, and of the calls that pass them in compiled code: see `kernels.host.gate`."""

from __future__ import annotations

# A gate: what a group's calls check before they run in their caller's thread, one for each `runtime.progress.Progress`.
(
    TAKE,  # addresses of Python objects: the lock's methods
    GIVE_BACK,
    NOTE,  # the method that notes the text of a call
    PENDING,  # see `Progress.pending`
    HELD,  # whether Python continues a call for which compiled code has taken the lock
    LOST,  # whether such a call has ended without giving the lock back
    GATE_FIELDS,
) = range(7)

# Addresses of Python objects, the same for all. NOT_HERE: a builtin returns it for calls that Python must handle.
NONE, TRUE, FALSE, NOT_HERE, NDARRAY, NEW_ARRAY, OBJECTS = range(7)

# A plan. From TEXT on, addresses of Python objects: what it notes; its array and the target; its value; the functions
# that continue it after a status, and that run it if the group is busy.
P_GATE, P_OBJECTS, P_KERNEL, P_ADDRESS, P_TEXT, P_SOURCE, P_TARGET, P_VALUE, P_RESUME, P_OTHERWISE, PLAN_FIELDS = range(
    11
)

# A verb of a communicator: its gate, and its table of kinds.
V_GATE, V_OBJECTS, V_KINDS, VERB_FIELDS = range(4)
KINDS = 64  # rows of the table; a power of two
MOST_DIMENSIONS, MOST_KEYS = 6, 3

# A kind of call: the arrays that it takes, the other arguments (by identity), and what runs it.
K_DTYPE, K_DIMENSIONS, K_SHAPE = range(3)
K_KEYS = K_SHAPE + MOST_DIMENSIONS
K_RESULT = K_KEYS + MOST_KEYS  # what the call returns: see below
K_RESULT_DIMENSIONS = K_RESULT + 1
K_RESULT_SHAPE = K_RESULT_DIMENSIONS + 1
K_EMPTY = K_RESULT_SHAPE + MOST_DIMENSIONS  # arguments of a new result: addresses of its shape (a tuple) and dtype
K_ITEM_BYTES, K_KERNEL, K_ADDRESS, K_TEXT, K_RESUME, KIND_FIELDS = range(K_EMPTY + 2, K_EMPTY + 8)

# Results: none on this rank; an array other than x; an array, or x itself; always x.
NOTHING, OTHER_ARRAY, ANY_ARRAY, SAME_ARRAY = range(4)


def mix(number: int, value: int) -> int:
    """Return a number for the row of a kind, from the same of its fields so far and the next one."""
    return (number * 31 + (value >> 4) + value) & 0xFFFFFFFF
