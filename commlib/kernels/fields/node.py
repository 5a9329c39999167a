"""Fields of the collectives within a node: the board, a communicator's control array, and calls."""

from __future__ import annotations

# Status codes.
DONE, WAITING, MISMATCH, BROKEN, PLACES_DIFFER = range(5)


# The board: one line per rank, two cache lines wide because CPUs prefetch in pairs. Byte offsets in a line:
LINE_BYTES, ARRIVED, ABANDONED, SIGNATURES, PLACES = 128, 0, 8, 16, 32

# Value of ABANDONED while a rank has not abandoned the board.
NEVER = 1 << 62


# Fields of the control array, one per communicator and rank. SLOTS is the address of a table of P addresses. FAILED is
# set when the ranks are out of step; every kernel then returns BROKEN at once. CALLS counts user calls.
EPOCH, RANK, SIZE, BOARD, SLOTS, SLOT_BYTES, FAILED, CALLS, CONTROL_FIELDS = range(9)

# Fields of a call.
(
    CONTROL,  # address of the control array
    STATE,  # resume point after WAITING; 0 to begin
    POSITION,  # elements done (in an exchange: bytes of each part), for kernels that work piece by piece
    PARITY,  # slot of the first piece of all_reduce_staged
    SIGNATURE,
    PLACE,
    REDUCE,  # address of the reduction; 0 in an exchange that only moves data
    INPUTS,  # address of a table of P addresses, in rank order
    OUTPUTS,
    COUNT,  # elements
    ITEM_BYTES,
    DIVISOR,
    SPINS,  # polls before the first yield
    YIELDS,  # yields before the first nap
    NAPS,  # naps before WAITING is returned
    NAP_MICROSECONDS,
    SOURCE,  # address of this rank's own array, and of the result
    TARGET,
    BACKWARD,  # whether the next pass over this rank's share begins at its end; alternates
    PARTS,  # of an exchange: number of parts of each rank's array: one for all ranks, or one per rank
    PART_BYTES,  # space for each part in a slot
    TAKE,  # the part that this rank takes of each rank's array
    LONGEST,  # bytes of the longest part of any rank, which sets the number of pieces on all ranks
    SEND_OFFSETS,  # addresses of tables: bytes from SOURCE to each part, and its length
    SEND_LENGTHS,
    RECV_OFFSETS,  # bytes from TARGET to the part of each peer, and its length
    RECV_LENGTHS,
    ROOT,  # of a broadcast
    COUNTS,  # 1 for a user call, 0 for a part of one
    OPERANDS,  # of a reducing exchange: the number of ranks, from the first on, whose parts are combined
    CALL_FIELDS,
) = range(31)
