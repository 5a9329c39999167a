"""Fields of a channel between nodes: further ones of an end, rows of slots, and headers of messages."""

from __future__ import annotations

from commlib.kernels.fields.channel import END_FIELDS

PYTHONS = 2  # value of BUSY while Python holds it

LAGS = 1  # a status in addition to `channel.DONE`, `OTHER` and slots: a message was put but not sent yet

LARGE_BYTES = 32 << 10  # from this size on, a message may need its receiver's progress to arrive

# Further fields of an end. POSTED counts the pending receives, the next one in the slot RING[FIRST].
(
    START,  # addresses of functions
    TEST,
    FLAG,  # address of an int32
    STATUS,  # address of memory for a status
    ROWS,  # address of the first slot's row
    RING,
    FIRST,
    POSTED,
    POLLS,
    POSTED_FIELDS,
) = range(END_FIELDS, END_FIELDS + 10)

# Fields of a slot's row. KNOWN: from WHAT on, the header of the slot's last message, whose payload of NBYTES began at
# DATA. LIKE is false if Python handles messages like it. HELD: the number of a received message that was not released,
# or 0. LENGTH: the bytes of the arriving payload, once Python has seen it, else -1.
HANDLE, HEAD, DATA, NBYTES, ROOM, LIKE, HELD, LENGTH, KNOWN = range(9)

# The header of a message: its number, its kind (0: an array) times KIND plus its dimensions, and its length in each
# dimension. The payload follows directly: a network sends a few bytes faster.
NUMBER, WHAT, LENGTHS = range(3)

KIND, MOST_DIMENSIONS = 256, 12

HEAD_FIELDS = LENGTHS + MOST_DIMENSIONS

ROW_FIELDS = KNOWN + HEAD_FIELDS - WHAT
