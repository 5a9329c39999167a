"""Fields of all_to_all_v within a node: calls, their parts, notes and peers."""

from __future__ import annotations

# Status codes in addition to those of `node`. SIZED: call again after setting TARGET to memory for the received rows.
# REFUSED: this rank's arguments are invalid, or its arrays overlap, and nothing was done.
SIZED, UNEQUAL, UNFIT, UNREADABLE, REFUSED = range(5, 10)


# Fields of a call.
(
    CALL,  # the address of its call of `node`
    PLACES,  # as in a route of `placed`
    ROW,  # bytes of a row
    KNOWN,  # whether this rank gives the row counts to receive; the same on all ranks
    READS,  # whether all ranks can read each other's memory
    PROCESSES,  # the address of a table of the ranks' process ids
    PEERS,  # the address of a table with PEER_FIELDS for each rank
    SOURCE,  # addresses of this rank's array, and of its result (0: none yet)
    TARGET,
    PARTS,  # address of the call's parts: see below
    ROUND,  # number of windows done
    ROUNDS,  # number of windows of the longest stream
    AFTER,  # whether all ranks synchronize again at the end
    VERDICT,
    MODE,  # mode of this rank's parts
    TOTAL,  # bytes that this rank sends to others
    RANGES,  # the address of space for two ranges of `process_vm_readv`
    FIELDS,
) = range(18)

# A call's parts: `id` of its result (0: none yet), rows of the result, rows of the array, row counts to send to each
# rank, and row counts to receive from each rank.
OUT, OUT_ROWS, ROWS, SPLITS = range(4)

# A note: header, offsets in rows of each rank's part in the sender's array, and the end of the last part; the same for
# the received rows, if the rank knows them.
N_MODE, N_SEGMENT, N_OFFSET, N_OUT_SEGMENT, N_OUT_OFFSET, N_TOTAL, N_ADDRESS, HEAD = range(8)


# A peer: mode of its parts, bytes for this rank, their offset in TARGET, their offset in its stream; the address to
# copy from; the address to copy to, and its bytes; rows received, and rows that the peer expects from this rank.
MODES, LENGTH, AT, STREAM, FROM, TO, TARGET_BYTES, RECEIVED_ROWS, EXPECTED_ROWS, PEER_FIELDS = range(10)

NOW, PULL, HELD, PUSH, READ, LATE = range(6)


def note_bytes(size: int) -> int:
    """Return the size of one note; each rank has two, behind its slots."""
    return (8 * (HEAD + 2 * (size + 1)) + 63) // 64 * 64
