"""The table of receives that are posted to a lane: the message that comes first for a tag goes to the oldest of them.

A post is posted in a free row of the table, and freed by who posted it once its message has come. No message aside has
the tag of a waiting post.
"""

from __future__ import annotations

from typing import Any

import numba as nb

from commlib.kernels.host import intrinsics as ins
from commlib.kernels.host.arrays import table
from commlib.kernels.host.compiled import kernel
from commlib.kernels.host.lane import (
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
    claim,
    head_at,
    let_go,
)
from commlib.kernels.host.lane_aside import drop_aside, find_aside

# A post: its state, when it was posted, for which tag, where to, how many bytes fit, how many came, and the number of a
# message that comes another way.
STATE, ORDER, TAG, ADDRESS, ROOM, CAME, NUMBER, POST_FIELDS = range(8)
FREE, POSTED_HERE, HAS_COME, COMES_ELSEWHERE = range(4)


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _post(end: Any, index: int) -> Any:
    return table(end[POSTS] + 8 * POST_FIELDS * index, POST_FIELDS)


@kernel(nogil=True)
def waiting_post(end: Any, tag: int) -> int:
    """Return the post that waits longest for a tag, or -1."""
    found, least = -1, 0
    for index in range(end[POSTS_HIGH]):
        post = _post(end, index)
        if post[STATE] == POSTED_HERE and post[TAG] == tag and (found < 0 or post[ORDER] < least):
            found, least = index, post[ORDER]
    return found


@kernel(nogil=True)
def deliver(end: Any, index: int, at: int) -> None:
    """Give the message at an address to a post. What does not fit is not copied."""
    post, head = _post(end, index), head_at(at)
    post[CAME], post[NUMBER] = head[NBYTES], head[WAY_NUMBER]
    if head[MARK] == HERE and 0 < head[NBYTES] <= post[ROOM]:
        ins.memcpy(post[ADDRESS], at + HEAD_BYTES, head[NBYTES])
    post[STATE] = HAS_COME if head[MARK] == HERE else COMES_ELSEWHERE
    end[POSTS_WAITING] -= 1


@kernel(nogil=True)
def post(at: int, tag: int, target: int, room: int) -> int:
    """Post a receive of at most `room` bytes, and return its number; or FULL: the table is. Never waits."""
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
    posted[ORDER], posted[TAG], posted[ADDRESS], posted[ROOM] = end[POSTED], tag, target, room
    posted[STATE] = POSTED_HERE
    found = find_aside(end, tag)
    if found != 0:
        deliver(end, index, found)
        drop_aside(end, found)
    let_go(at)
    return index


@kernel(nogil=True)
def ask(at: int, index: int, field: int) -> int:
    """Return a field of a post."""
    claim(at)
    value = _post(table(at, END_FIELDS), index)[field]
    let_go(at)
    return value


@kernel(nogil=True)
def withdraw(at: int, index: int) -> int:
    """Take back a post that nothing has come for, and return 1; 0 if something has."""
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
    """Free a post for which something has come."""
    end = table(at, END_FIELDS)
    claim(at)
    _post(end, index)[STATE] = FREE
    while end[POSTS_HIGH] > 0 and _post(end, end[POSTS_HIGH] - 1)[STATE] == FREE:
        end[POSTS_HIGH] -= 1
    let_go(at)
    return DONE


@kernel(nogil=True)
def move_posts(at: int, posts: int, room: int) -> int:
    """Use another table for posts: DONE; or OTHER, if it has no more room."""
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
