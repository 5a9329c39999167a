"""Fields of a program of small messages."""

from __future__ import annotations

# Status codes of `play`. DIFFERENT: some marks differ from this rank's. FAILED: CODE has the error code.
DONE, DIFFERENT, WAITING, FAILED = 0, 1, -1, -2

(
    ROUNDS,  # number of rounds
    ROWS,  # address of the first round's row
    NEXT,  # the current or next round
    STARTED,  # whether it was started
    MARKS,  # address for `all_equal`, or 0
    START,  # addresses of functions
    TEST,
    FLAG,  # address of an int32
    STATUSES,  # address of memory for the statuses of a round
    SPINS,  # number of polls at once, then of polls with a yield, before WAITING is returned
    YIELDS,
    CODE,
    BUFFER,  # address and size of the messages' data
    NBYTES,
    PROGRAM_FIELDS,
) = range(15)

MESSAGES, HANDLES, COMBINATIONS, ADDRESSES, ROW_FIELDS = range(5)
