"""Fields of the receives that are posted on a ring."""

from __future__ import annotations

# A posted receive: its state, its position in the order of posts, tag, target address, size of the target, size of the
# message, and the number of a message that takes another path.
STATE, ORDER, TAG, ADDRESS, TARGET_BYTES, MESSAGE_BYTES, NUMBER, POST_FIELDS = range(8)

FREE, POSTED_HERE, ARRIVED, ARRIVES_ELSEWHERE = range(4)
