"""The ring of events, and its readers."""

from __future__ import annotations

import threading

import pytest

from commlib.observe.counters import Counters
from commlib.observe.journal import Journal
from commlib.observe.last_calls import LastCalls
from commlib.observe.recorder import Event, Phase, Record, Recorder


def opened(recorder, text="all_reduce of 1 x float32", group="world", **details):
    return Record(recorder, text, group, group, **details)


def test_the_ring_keeps_the_last_events_oldest_first():
    recorder = Recorder(5)
    for number in range(1, 5):
        record = opened(recorder, f"verb{number} of 1")
        record.run()
        record.end()
    events = recorder.events()
    assert [(event.record.number, event.phase.value) for event in events] == [
        (2, "end"), (3, "run"), (3, "end"), (4, "run"), (4, "end")
    ]  # fmt: skip
    assert [event.time for event in events] == sorted(event.time for event in events)
    assert {event.thread for event in events} == {threading.get_ident()}


def test_concurrent_writes_are_neither_lost_nor_doubled():
    recorder = Recorder(100_000)
    counters = Counters()
    recorder.subscribe(counters.read)
    copies, stop = [], threading.Event()

    def write(number):
        for _ in range(2000):
            record = opened(recorder, f"verb{number}", f"group{number}", nbytes=4)
            record.queue()
            record.run()
            record.end()

    def look():
        while not stop.is_set():
            copies.append(len(recorder.events()))

    writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    reader = threading.Thread(target=look)
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    reader.join()
    events = recorder.events()
    assert len(events) == 4 * 2000 * 3 and len({event.record.number for event in events}) == 4 * 2000
    assert copies == sorted(copies)
    for number in range(4):
        own = recorder.events(f"group{number}")
        assert [event.phase for event in own] == [Phase.QUEUED, Phase.RUN, Phase.END] * 2000
        assert [event.time for event in own] == sorted(event.time for event in own)
        assert counters.counts()[f"group{number}", f"verb{number}"].calls == 2000


def test_an_operation_ends_only_once():
    recorder = Recorder()
    record = opened(recorder)
    record.end(ValueError("bad"))
    record.end()
    assert [event.detail for event in recorder.events()] == ["ValueError: bad"]


def test_an_unsubscribed_listener_gets_no_events():
    recorder = Recorder()
    received: list[Event] = []
    recorder.subscribe(received.append)
    opened(recorder).run()
    recorder.unsubscribe(received.append)
    opened(recorder).run()
    assert len(received) == 1 and len(recorder.events()) == 2


@pytest.mark.parametrize(
    "text, verb",
    [("all_reduce of 3 x float32, op=sum", "all_reduce"), ("broadcast_object, root=0", "broadcast_object"),
     ("barrier", "barrier"), ("send to rank 1, tag 0", "send"), ("", "")],
)  # fmt: skip
def test_verbs_are_parsed_from_texts(text, verb):
    assert opened(Recorder(), text).verb == verb


def test_operations_are_counted():
    recorder, counters = Recorder(), Counters()
    recorder.subscribe(counters.read)
    for error in (None, ValueError("x"), None):
        record = opened(recorder, nbytes=100)
        record.queue()
        record.run()
        record.end(error)
    opened(recorder, "barrier").run()  # it has not ended
    dropped = opened(recorder, "barrier")
    dropped.queue()
    dropped.end(ValueError("shut down"))
    counts = counters.counts()
    count = counts["world", "all_reduce"]
    assert (count.calls, count.failed, count.nbytes) == (3, 1, 300)
    ended = [event.record for event in recorder.events() if event.phase is Phase.END and event.verb == "all_reduce"]
    assert count.seconds == pytest.approx(sum(record.ended - record.began for record in ended) / 1e9)
    assert count.waited == pytest.approx(sum(record.began - record.queued for record in ended) / 1e9)
    barrier = counts["world", "barrier"]
    assert (barrier.calls, barrier.failed, barrier.nbytes, barrier.seconds) == (1, 1, 0, 0.0) and barrier.waited > 0


def test_the_last_operations_of_a_rank_are_described():
    recorder, last_words = Recorder(1), LastCalls()
    recorder.subscribe(last_words.read)
    assert last_words.describe("world") == ""
    for number in range(30):
        record = opened(recorder, f"old{number}")
        record.queue()
        record.run()
        record.end()
    opened(recorder, "elsewhere", "other").run()
    opened(recorder, "allreduce", name="grad").queue()
    bad = opened(recorder, "broken")
    bad.run()
    bad.end(ValueError("no"))
    first, second = opened(recorder, "barrier"), opened(recorder, "all_gather of 1")
    first.sequence = 7
    first.run()
    second.queue()
    first.round("round 2 of block 1 posted")
    assert last_words.describe("world") == (
        "; last on this rank: old29 ended 0.0 s ago; broken failed (ValueError) 0.0 s ago; "
        "all_gather of 1 queued 0.0 s ago; barrier (call 7) round 2 of block 1 posted, 0.0 s ago"
    )
    assert last_words.describe("world", named=True) == "; last on this rank: grad: allreduce queued 0.0 s ago"


def test_a_journal_numbers_calls_when_they_begin():
    done = [10]
    journal = Journal("world", "key", lambda: done[0])
    assert journal.open("barrier") is None and journal.queue("barrier") is None and journal.run(None, lambda: 3) == 3
    journal.recorder = recorder = Recorder()
    first, second = journal.queue("first"), journal.queue("second")
    for record in (first, second):
        assert journal.run(record, lambda: journal.current) is record
        done[0] += 1
    assert journal.current is None
    assert [event.sequence for event in recorder.events()] == [11, 12, 11, 11, 12, 12]
    begun = journal.open("begun")
    assert begun is not None

    def begin():
        done[0] += 1  # the code that begins a call may count it
        return False

    assert not journal.begin(begun, begin)
    journal.run(begun, lambda: None)
    assert begun.sequence == 13
    assert [event.phase for event in recorder.events()][-3:] == [Phase.BEGUN, Phase.RUN, Phase.END]
