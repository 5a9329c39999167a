"""Fields of routes: see `kernels.host.call_routes`."""

from __future__ import annotations

EXCHANGE, BROADCAST, ALL_REDUCE, BARRIER = range(4)

(
    KIND,  # one of the four above
    STAGED,  # the address of the call through the slots
    SYMMETRIC,  # the address of the call on symmetric memory
    PLACES,  # the address of two numbers: address and number of the rows; 0: always use the slots
    RANKS,  # number of ranks of the node
    OFFSETS,  # the address of a table: offset of this rank's part in each rank's array; 0: no offsets
    LOOKED_UP,  # the array of an exchange that must be symmetric: SOURCE or TARGET, as fields of a call
    NBYTES,  # its length, in an all-reduce the length of both
    COUNTED,  # 1 for a user call, 0 for a part of one
    ACTIVE,  # the call in progress: 0 for none, else STAGED or SYMMETRIC
    ROUTE_FIELDS,
) = range(11)
