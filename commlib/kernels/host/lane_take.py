"""How messages come out of a lane: to the receive that was posted first for their tag, or aside until there is one.

Receives are posted in a table of POSTS. What nobody waits for when it is found is moved *aside*, to memory of the
receiver alone, in the order in which it was sent: so one message that nobody wants does not block the ring. No message
aside has the tag of a waiting post.
"""

from __future__ import annotations

from typing import Any

import numba as nb

from commlib.kernels.host import arrays
from commlib.kernels.host import intrinsics as ins
from commlib.kernels.host.arrays import table
from commlib.kernels.host.compiled import kernel
from commlib.kernels.host.lane import (
    ASIDE,
    ASIDE_FIRST,
    ASIDE_LAST,
    ASIDE_NUMBER,
    ASIDE_UNITS,
    DONE,
    DTYPES,
    END_FIELDS,
    FREED_AT,
    FULL,
    HALTED,
    HEAD_BYTES,
    HERE,
    MARK_AT,
    MEMORY,
    MOST_TAGS,
    NEXT_AT,
    NOTHING,
    OTHER,
    POSITION,
    POSTED,
    POSTS,
    POSTS_HIGH,
    POSTS_ROOM,
    POSTS_WAITING,
    RING,
    RING_AT,
    STOPPED,
    UNIT,
    UNITS,
    WAITING,
    claim,
    let_go,
    note_at,
    pause,
    units_of,
)

# A post: its state, when it was posted, for which tag, where to, how many bytes fit, how many came, and the number of a
# message that comes another way.
STATE, ORDER, TAG, ADDRESS, ROOM, CAME, NUMBER, POST_FIELDS = range(8)
FREE, POSTED_HERE, HAS_COME, COMES_ELSEWHERE = range(4)

DRAINED = 1  # what `find` returns where another ring follows


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _post(end: Any, index: int) -> Any:
    return table(end[POSTS] + 8 * POST_FIELDS * index, POST_FIELDS)


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _length(record: Any) -> Any:
    """Return how many units a record takes."""
    return units_of(record[2]) if record[0] == HERE else record[2] if record[0] == NOTHING else 1


@kernel(nogil=True)
def _waiting(end: Any, tag: int) -> int:
    """Return the post that waits longest for a tag, or -1."""
    found, least = -1, 0
    for index in range(end[POSTS_HIGH]):
        post = _post(end, index)
        if post[STATE] == POSTED_HERE and post[TAG] == tag and (found < 0 or post[ORDER] < least):
            found, least = index, post[ORDER]
    return found


@kernel(nogil=True)
def _deliver(end: Any, index: int, at: int) -> None:
    """Give the record at an address to a post. What does not fit is not copied."""
    post, record = _post(end, index), table(at, 4)
    post[CAME], post[NUMBER] = record[2], record[3]
    if record[0] == HERE and 0 < record[2] <= post[ROOM]:
        ins.memcpy(post[ADDRESS], at + HEAD_BYTES, record[2])
    post[STATE] = HAS_COME if record[0] == HERE else COMES_ELSEWHERE
    end[POSTS_WAITING] -= 1


@kernel(nogil=True)
def _free(end: Any, at: int, units: int) -> None:
    """Give units of the ring back to the sender. Where no message was, all but the first begin with 0."""
    for unit in range(1 if table(at, 1)[0] == NOTHING else units):
        table(at + unit * UNIT, 1)[0] = 0
    end[POSITION] += units
    ins.store_release(end[MEMORY] + FREED_AT, end[POSITION])


@kernel(nogil=True)
def _move_aside(end: Any, at: int, units: int) -> bool:
    """Keep a record for later; False if there is no room."""
    if end[ASIDE_LAST] + units > end[ASIDE_UNITS]:
        return False
    ins.memcpy(end[ASIDE] + end[ASIDE_LAST] * UNIT, at, units * UNIT)
    end[ASIDE_LAST] += units
    return True


@kernel(nogil=True)
def _find_aside(end: Any, tag: int) -> int:
    """Return the address of the oldest message aside with this tag, or 0."""
    place = end[ASIDE_FIRST]
    while place < end[ASIDE_LAST]:
        record = table(end[ASIDE] + place * UNIT, 4)
        if record[0] != NOTHING and record[1] == tag:
            return end[ASIDE] + place * UNIT
        place += _length(record)
    return 0


@kernel(nogil=True)
def _drop_aside(end: Any, at: int) -> None:
    """Keep a record no longer."""
    record = table(at, 4)
    record[2] = _length(record)
    record[0] = NOTHING
    while end[ASIDE_FIRST] < end[ASIDE_LAST]:
        first = table(end[ASIDE] + end[ASIDE_FIRST] * UNIT, 4)
        if first[0] != NOTHING:
            return
        end[ASIDE_FIRST] += first[2]
    end[ASIDE_FIRST] = end[ASIDE_LAST] = 0


@kernel(nogil=True)
def _live_aside(end: Any) -> int:
    units, place = 0, end[ASIDE_FIRST]
    while place < end[ASIDE_LAST]:
        record = table(end[ASIDE] + place * UNIT, 4)
        units += 0 if record[0] == NOTHING else _length(record)
        place += _length(record)
    return units


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _fits(record: Any, nbytes: int) -> Any:
    return record[0] == HERE and record[2] == nbytes


@kernel(nogil=True)
def _find(end: Any, tag: int, target: int, nbytes: int) -> int:
    """Look at what has come; give it to posts, and the first message with `tag`, if it fits, to `target`.

    DONE: it is there. WAITING: it has not come. OTHER: it has come, and is as it was, but does not fit. FULL: more room
    is needed aside. DRAINED: another ring follows. Without a tag (-1): look at all.
    """
    if tag >= 0 and end[ASIDE_FIRST] < end[ASIDE_LAST]:
        at = _find_aside(end, tag)
        if at != 0:
            if not _fits(table(at, 4), nbytes):
                return OTHER
            ins.memcpy(target, at + HEAD_BYTES, nbytes)
            _drop_aside(end, at)
            return DONE
    if end[RING] == 0:
        return WAITING
    ring = end[MEMORY] + RING_AT
    while True:
        at = ring + end[POSITION] % end[UNITS] * UNIT
        if ins.load_acquire(at + MARK_AT) == 0:
            if ins.load_acquire(end[MEMORY] + NEXT_AT) == 0:
                return WAITING
            if ins.load_acquire(at + MARK_AT) == 0:  # nothing came between the two looks
                return DRAINED
        record = table(at, 4)
        units = _length(record)
        if record[0] != NOTHING:
            index = _waiting(end, record[1]) if end[POSTS_WAITING] > 0 else -1
            if index >= 0:
                _deliver(end, index, at)
            elif record[1] == tag:
                if not _fits(record, nbytes):
                    return OTHER
                ins.memcpy(target, at + HEAD_BYTES, nbytes)
                _free(end, at, units)
                return DONE
            elif not _move_aside(end, at, units):
                return FULL
        _free(end, at, units)


@kernel(nogil=True)
def take(at: int, array: int, tag: int) -> int:
    """Receive into a numpy array, given by its `id`, after all posts for the tag.

    DONE. Or WAITING, STOPPED, OTHER, after which nothing has come into the array: Python must do it.
    """
    end = table(at, END_FIELDS)
    if end[HALTED] != 0:
        return STOPPED
    nbytes = arrays.plain_bytes(array, arrays.C_CONTIGUOUS | arrays.WRITEABLE, end[DTYPES])
    if nbytes < 0 or tag < 0 or tag >= MOST_TAGS:
        return OTHER
    target, note = ins.load_acquire(array + arrays.DATA), note_at(end, at, array)
    ins.store_release(note, 0)
    polls = 0
    while True:
        claim(at)
        status = _find(end, tag, target, nbytes)
        let_go(at)
        if status == DONE:
            ins.store_release(note, array)
            return DONE
        if status != WAITING:
            return OTHER
        polls += 1
        if not pause(end, polls):
            return WAITING


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
    found = _find_aside(end, tag)
    if found != 0:
        _deliver(end, index, found)
        _drop_aside(end, found)
    let_go(at)
    return index


@kernel(nogil=True)
def look(at: int) -> int:
    """Give what has come to posts. WAITING, FULL or DRAINED: see `_find`. Never waits."""
    claim(at)
    status = _find(table(at, END_FIELDS), -1, 0, 0)
    let_go(at)
    return status


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


@kernel(nogil=True)
def renew_aside(at: int, number: int, memory: int, units: int) -> int:
    """Use other memory for what is aside, if what is used has this number, and fits there: DONE or OTHER."""
    end = table(at, END_FIELDS)
    claim(at)
    status = OTHER
    if end[ASIDE_NUMBER] == number and _live_aside(end) <= units:
        kept, place = 0, end[ASIDE_FIRST]
        while place < end[ASIDE_LAST]:
            record = table(end[ASIDE] + place * UNIT, 4)
            length = _length(record)
            if record[0] != NOTHING:
                ins.memcpy(memory + kept * UNIT, end[ASIDE] + place * UNIT, length * UNIT)
                kept += length
            place += length
        end[ASIDE], end[ASIDE_UNITS], end[ASIDE_FIRST], end[ASIDE_LAST] = memory, units, 0, kept
        end[ASIDE_NUMBER] = number + 1
        status = DONE
    let_go(at)
    return status


@kernel(nogil=True)
def aside_units(at: int) -> int:
    """Return how many units the messages aside take."""
    claim(at)
    units = _live_aside(table(at, END_FIELDS))
    let_go(at)
    return units
