"""Fields of a channel within a node: the header of a slot, and the end of a rank."""

from __future__ import annotations

# Status codes. `take` returns the slot, which is not negative, if it has taken a message.
DONE, WAITING, STOPPED, OTHER, HELD = 0, -1, -2, -3, -4

# The header of a slot: the sender's line, the receiver's line, and the sender's message description, which is written
# only when it changes. CPUs prefetch lines of 64 bytes in pairs. Small messages are stored in the sender's line.
NUMBER_AT, SPEC_AT, INLINE_AT, BACK_AT, RECORD_AT, HEAD_BYTES = 0, 8, 16, 128, 256, 2560

INLINE_BYTES, RECORD_BYTES = BACK_AT - INLINE_AT, HEAD_BYTES - RECORD_AT

# Fields of an end.
(
    HEADS,  # address of the first slot's header
    DEPTH,
    COUNT,  # number of messages that this end has put, or taken
    SLOT,  # slot of the next message
    DATA,  # address of the first slot's data, and distance in bytes between the data of slots
    STRIDE,
    NBYTES,  # of a message
    SPEC,  # number of shape changes; 0 before the handshake
    DESCR,  # for the arrays that `put` accepts: the `id` of their dtype, and their dimensions
    NDIM,
    SHAPE,  # address of a table
    BUSY,
    HALTED,  # no message moves, or Python must check first
    SPINS,  # polls before the first yield
    YIELDS,  # yields before the first nap
    NAPS,  # naps before WAITING is returned
    NAP_MICROSECONDS,
    STREAMED,  # messages of at least this many bytes bypass the caches
    END_FIELDS,
) = range(19)
