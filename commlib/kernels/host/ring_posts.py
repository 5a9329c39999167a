"""Posted receives: a table of the receives of a ring. A message goes to the oldest receive posted for its tag.

The caller posts a receive in a free row of the table, and frees the row after the message has arrived. No stored
unexpected message has the tag of a waiting receive.
"""

from __future__ import annotations

from typing import Any

import numba as nb

from commlib.kernels.fields.ring_posts import (
    ADDRESS,
    ARRIVED,
    ARRIVES_ELSEWHERE,
    FREE,
    MESSAGE_BYTES,
    NUMBER,
    ORDER,
    POST_FIELDS,
    POSTED_HERE,
    STATE,
    TAG,
    TARGET_BYTES,
)
from commlib.kernels.fields.shm_ring import (
    DONE,
    END_FIELDS,
    FULL,
    HEAD_BYTES,
    HERE,
    MARK,
    NBYTES,
    OTHER,
    POSTED,
    POSTS,
    POSTS_HIGH,
    POSTS_ROOM,
    POSTS_WAITING,
    WAY_NUMBER,
)
from commlib.kernels.host import intrinsics as ins
from commlib.kernels.host.arrays import table
from commlib.kernels.host.compilation import kernel
from commlib.kernels.host.ring_unexpected import drop_unexpected, find_unexpected
from commlib.kernels.host.shm_ring import (
    claim,
    head_at,
    let_go,
)


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _post(end: Any, index: int) -> Any:
    return table(end[POSTS] + 8 * POST_FIELDS * index, POST_FIELDS)


@kernel(nogil=True)
def waiting_post(end: Any, tag: int) -> int:
    """Return the oldest waiting receive for a tag, or -1."""
    oldest, least = -1, 0
    for index in range(end[POSTS_HIGH]):
        post = _post(end, index)
        if post[STATE] == POSTED_HERE and post[TAG] == tag and (oldest < 0 or post[ORDER] < least):
            oldest, least = index, post[ORDER]
    return oldest


@kernel(nogil=True)
def deliver(end: Any, index: int, at: int) -> None:
    """Deliver the message at an address to a posted receive. A message that does not fit is not copied."""
    post, head = _post(end, index), head_at(at)
    post[MESSAGE_BYTES], post[NUMBER] = head[NBYTES], head[WAY_NUMBER]
    if head[MARK] == HERE and 0 < head[NBYTES] <= post[TARGET_BYTES]:
        ins.memcpy(post[ADDRESS], at + HEAD_BYTES, head[NBYTES])
    post[STATE] = ARRIVED if head[MARK] == HERE else ARRIVES_ELSEWHERE
    end[POSTS_WAITING] -= 1


@kernel(nogil=True)
def post(at: int, tag: int, target: int, room: int) -> int:
    """Post a receive of at most `room` bytes, and return its number; or FULL if the table is full. Never waits."""
    end = table(at, END_FIELDS)
    claim(at)
    index = 0
    while index < end[POSTS_HIGH] and _post(end, index)[STATE] != FREE:
        index += 1
    if index == end[POSTS_ROOM]:
        let_go(at)
        return FULL
    end[POSTS_HIGH] = max(end[POSTS_HIGH], index + 1)
    end[POSTED] += 1
    end[POSTS_WAITING] += 1
    posted = _post(end, index)
    posted[ORDER], posted[TAG], posted[ADDRESS], posted[TARGET_BYTES] = end[POSTED], tag, target, room
    posted[STATE] = POSTED_HERE
    message = find_unexpected(end, tag)
    if message != 0:
        deliver(end, index, message)
        drop_unexpected(end, message)
    let_go(at)
    return index


@kernel(nogil=True)
def read_field(at: int, index: int, field: int) -> int:
    """Return a field of a posted receive."""
    claim(at)
    value = _post(table(at, END_FIELDS), index)[field]
    let_go(at)
    return value


@kernel(nogil=True)
def withdraw(at: int, index: int) -> int:
    """Cancel a posted receive without a message, and return 1; return 0 if its message has arrived."""
    end = table(at, END_FIELDS)
    claim(at)
    posted, was_waiting = _post(end, index), 0
    if posted[STATE] == POSTED_HERE:
        posted[STATE] = FREE
        end[POSTS_WAITING] -= 1
        was_waiting = 1
    let_go(at)
    return was_waiting


@kernel(nogil=True)
def forget(at: int, index: int) -> int:
    """Free a posted receive whose message has arrived."""
    end = table(at, END_FIELDS)
    claim(at)
    _post(end, index)[STATE] = FREE
    while end[POSTS_HIGH] > 0 and _post(end, end[POSTS_HIGH] - 1)[STATE] == FREE:
        end[POSTS_HIGH] -= 1
    let_go(at)
    return DONE


@kernel(nogil=True)
def move_posts(at: int, posts: int, room: int) -> int:
    """Switch to another table of posted receives: DONE, or OTHER if it is not larger."""
    end = table(at, END_FIELDS)
    claim(at)
    status = OTHER
    if room > end[POSTS_ROOM]:
        if end[POSTS_HIGH] > 0:
            ins.memcpy(posts, end[POSTS], 8 * POST_FIELDS * end[POSTS_HIGH])
        end[POSTS], end[POSTS_ROOM] = posts, room
        status = DONE
    let_go(at)
    return status
