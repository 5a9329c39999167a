"""A diagnosis names the fault, from the dumps of the ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commlib.errors import UsageError
from commlib.observe.diagnosis import Diagnosis, diagnose
from commlib.observe.dump import (
    CallPhase,
    CallState,
    Dump,
    Frame,
    GroupState,
    NamedCall,
    ProcessState,
    ThreadState,
    Wait,
    members,
    ranges_of,
)
from commlib.observe.hang_folder import HangFolder, find_hangs

SIZE = 4
CALL = "all_reduce of 4 x float32, op=sum, algorithm=auto"


def thread(line, *, inside):
    stack = (Frame("train.py", 1, "<module>", "main()"), Frame("train.py", line, "step", "work()"))
    return ThreadState("MainThread", 7, stack, 1, inside)


def group(key, calls, texts=None, ranks=range(SIZE), running=True):
    texts = [CALL] * calls if texts is None else texts
    first = calls - len(texts) + 1
    states: list[CallPhase] = ["ended"] * len(texts)
    if running and texts:
        states[-1] = "running"
    numbers = range(first, first + len(texts))
    operations = [
        CallState("all_reduce", *call) for call in zip(texts, numbers, [16] * len(texts), states, strict=True)
    ]
    return GroupState(key, key, ranges_of(ranks), calls, tuple(operations))


def dump(rank, *, groups=(), waits=(), named=(), line=None, inside=None, neighbours=()):
    inside = bool(waits or named) if inside is None else inside
    line = 10 + rank if line is None else line
    threads = (thread(line, inside=inside),)
    return Dump(
        1, rank, SIZE, "host", 100 + rank, 1e9, 5.0, tuple(waits), tuple(groups), tuple(named), threads,
        tuple(neighbours),
    )  # fmt: skip


def in_call(rank, key, number, *, ranks=range(SIZE), seconds=6.0, text=CALL, texts=None, more=()):
    wait = Wait(f"{key}: {text}", key, number, seconds, None, 7)
    return dump(rank, groups=[group(key, number, texts, ranks), *more], waits=[wait])


def kinds(diagnosis: Diagnosis):
    return [(finding.kind, finding.ranks) for finding in diagnosis.findings]


def test_a_late_rank_is_located():
    """It is in its own code: the diagnosis names the waiting ranks, their call, and its position."""
    late = dump(2, groups=[group("world", 2, running=False)])
    diagnosis_ = diagnose([*(in_call(rank, "world", 3) for rank in (0, 1, 3)), late])
    assert kinds(diagnosis_) == [("missing", (2,))]
    text = diagnosis_.findings[0].text
    assert text.startswith(f"rank 2 is missing in world: {CALL} (call 3), where ranks 0-1, 3 wait;")
    assert text.endswith("it is at train.py:12 in step: work()")
    assert diagnosis_.seconds == 6.0


def test_ranks_missing_at_the_same_place_are_reported_together():
    late = [dump(rank, groups=[group("world", 2, running=False)], line=20) for rank in (2, 3)]
    diagnosis_ = diagnose([*(in_call(rank, "world", 3) for rank in (0, 1)), *late])
    assert kinds(diagnosis_) == [("missing", (2, 3))]
    text = diagnosis_.findings[0].text
    assert text.startswith("ranks 2-3 are missing in world: ") and "; they are at train.py:20" in text


def test_a_rank_without_calls_in_the_group_is_named():
    diagnosis_ = diagnose([*(in_call(rank, "world", 1) for rank in (0, 1, 3)), dump(2)])
    assert kinds(diagnosis_) == [("missing", (2,))]


def test_ranks_in_the_same_state_are_reported_together():
    same = [replace(in_call(rank, "world", 1), threads=(thread(5, inside=True),)) for rank in (0, 1, 3)]
    states = diagnose([*same, dump(2)]).states
    assert [(state.ranks, state.place) for state in states] == [
        ((0, 1, 3), "train.py:5 in step: work()"),
        ((2,), "train.py:12 in step: work()"),
    ]


@pytest.mark.parametrize(
    "state, kind, words",
    [("T", "stopped", "kill -CONT 102"), ("", "gone", "has ended"), ("D", "silent", "disk"), ("R", "silent", "lock")],
)
def test_a_rank_without_a_dump_is_described_by_its_neighbours(state, kind, words):
    """Its neighbours recorded the state of its process."""
    seen = ProcessState(2, "host", 102, state)
    diagnosis_ = diagnose([replace(in_call(rank, "world", 1), neighbours=(seen,)) for rank in (0, 1, 3)])
    assert kinds(diagnosis_) == [(kind, (2,))]
    assert words in diagnosis_.findings[0].text and "102" in diagnosis_.findings[0].text


def test_ranks_waiting_for_a_stopped_rank_are_not_called_missing():
    """Ranks 1 and 3 wait for rank 2, and that one for rank 0, which cannot write."""
    seen = ProcessState(0, "host", 100, "T")
    behind = [group("world", 4, running=False)]
    dumps = [
        replace(in_call(1, "world", 5), neighbours=(seen,)),
        in_call(2, "pair", 2, ranks=(0, 2), more=behind),
        in_call(3, "world", 5),
    ]
    assert kinds(diagnose(dumps)) == [("stopped", (0,))]


def test_ranks_without_any_information_are_listed():
    diagnosis_ = diagnose([in_call(0, "world", 1)])
    assert kinds(diagnosis_) == [("silent", (1, 2, 3))]


def test_the_first_different_call_is_found_though_all_wait_in_a_later_one():
    """Rank 1 has skipped a call, so later calls have lower numbers on it."""
    other = "broadcast of shape (4,) float32, root=0, algorithm=auto"
    skipped = in_call(1, "world", 9, texts=[CALL, other, CALL, CALL])  # calls 6 to 9
    ranks = [in_call(rank, "world", 9, texts=[CALL, CALL, other, CALL]) for rank in (0, 2, 3)]
    diagnosis_ = diagnose([ranks[0], skipped, *ranks[1:]])
    assert [kind for kind, _ in kinds(diagnosis_)] == ["mismatch"]
    assert "world: call 7 is not the same on all ranks" in diagnosis_.findings[0].text
    assert f"ranks 0, 2-3: {CALL}" in diagnosis_.findings[0].text and f"rank 1: {other}" in diagnosis_.findings[0].text


def test_a_survived_difference_is_not_reported():
    """Some verbs let mismatched ranks continue; ranks that wait elsewhere have another reason."""
    odd = group("A", 1, ["barrier"])
    even = group("A", 1, [CALL])
    diagnosis_ = diagnose([in_call(0, "world", 2, more=[odd]), in_call(1, "world", 2, more=[even]), dump(2), dump(3)])
    assert [kind for kind, _ in kinds(diagnosis_)] == ["missing", "missing"]


def test_groups_waiting_for_each_other_are_a_deadlock():
    """Rank 0 is in A and rank 1 in B, and both are needed in both. Rank 3 only waits behind them."""
    pair, behind = (0, 1), (1, 3)
    diagnosis_ = diagnose(
        [
            in_call(0, "A", 1, ranks=pair),
            in_call(1, "B", 1, ranks=pair),
            dump(2, inside=False),
            in_call(3, "C", 1, ranks=behind),
        ]
    )
    assert kinds(diagnosis_) == [("deadlock", (0, 1))]
    text = diagnosis_.findings[0].text
    assert f"rank 0 waits for rank 1 in A: {CALL} (call 1)\n      at train.py:10 in step" in text
    assert f"rank 1 waits for rank 0 in B: {CALL} (call 1)\n      at train.py:11 in step" in text


def test_messages_in_a_circle_are_a_deadlock():
    waits = {0: 1, 1: 2, 2: 0}
    dumps = [
        dump(rank, waits=[Wait(f"world: recv from rank {peer}", "world", 0, 6.0, (peer,), 7)])
        for rank, peer in waits.items()
    ]
    assert kinds(diagnose([*dumps, dump(3)])) == [("deadlock", (0, 1, 2))]


def test_computing_ranks_with_queued_works_are_in_no_circle():
    """They will reach the wait."""
    runs_works = ThreadState("commlib-progress", 7, (), -1, False)
    computes = replace(thread(5, inside=False), identifier=1)
    one = replace(in_call(0, "A", 1, ranks=(0, 1)), threads=(computes, runs_works))
    two = replace(in_call(1, "B", 1, ranks=(0, 1)), threads=(computes, runs_works))
    assert [kind for kind, _ in kinds(diagnose([one, two, dump(2), dump(3)]))] == ["unknown"]


def test_missing_named_operations_are_reported():
    """Ranks 0 and 2 have requested an operation that the others have not."""
    named_call = NamedCall("process set 0", "w", "allreduce 'w'", ((0, SIZE - 1),), 8.0)
    diagnosis_ = diagnose([dump(0, named=[named_call]), dump(1), dump(2, named=[named_call]), dump(3)])
    assert kinds(diagnosis_) == [("missing", (1,)), ("missing", (3,))]
    text = "rank 1 is missing in process set 0: allreduce 'w', where ranks 0, 2 wait; it is at train.py:11"
    assert diagnosis_.findings[0].text.startswith(text) and diagnosis_.seconds == 8.0


@pytest.mark.parametrize(
    ("ranks", "ranges"), [((), ()), ((3,), ((3, 3),)), (range(9), ((0, 8),)), ((5, 0, 1, 7, 6), ((0, 1), (5, 7)))]
)
def test_ranks_are_kept_as_ranges(ranks, ranges):
    assert ranges_of(ranks) == ranges and list(members(ranges)) == sorted(ranks)


def test_a_plain_wait_gives_no_findings():
    """All are in the same call."""
    assert kinds(diagnose([in_call(rank, "world", 3) for rank in range(SIZE)])) == [("unknown", ())]


def test_dumps_survive_their_files(tmp_path):
    named_call = NamedCall("process set 0", "w", "allreduce 'w'", ((0, 1),), 8.0)
    seen = ProcessState(2, "host", 102, "T")
    written = [
        replace(in_call(0, "world", 3), named=(named_call,), neighbours=(seen,)),
        dump(1, waits=[Wait("recv", "world", 0, 6.0, (0,), 7)]),
    ]
    folder = HangFolder.of(tmp_path, "abc", 1)
    assert not folder.exists()
    folder.create()
    for each in written:
        folder.write(each)
    assert folder.exists() and folder.ranks() == {0, 1} and folder.read() == written
    assert sorted(path.name for path in folder.path.iterdir()) == ["rank-0.json", "rank-1.json"]  # no other files


def test_one_rank_claims_the_diagnosis_and_one_claims_the_end(tmp_path):
    folder = HangFolder.of(tmp_path, "abc", 1)
    folder.create()
    assert not folder.is_diagnosed and not folder.has_ended
    assert [folder.claim("first"), folder.claim("second")] == [True, False]
    assert [folder.end(), folder.end()] == [True, False]
    assert folder.is_diagnosed and folder.has_ended
    assert (folder.path / "diagnosis.txt").read_text() == "first\n"


def test_hangs_are_found_in_every_folder_above_them(tmp_path):
    """Of two jobs, the latest last; a job's folder without dumps does not count."""
    HangFolder.of(tmp_path, "empty", 1).create()
    for token, number in (("one", 1), ("two", 1), ("two", 2)):
        folder = HangFolder.of(tmp_path, token, number)
        folder.create()
        folder.write(dump(0))
    names = [[f"{hang.path.parent.name}/{hang.path.name}" for hang in find_hangs(path)] for path in (
        tmp_path, tmp_path / "job-two", tmp_path / "job-two" / "hang-2"
    )]  # fmt: skip
    assert names == [["job-one/hang-1", "job-two/hang-1", "job-two/hang-2"], ["job-two/hang-1", "job-two/hang-2"], [
        "job-two/hang-2"
    ]]  # fmt: skip


def test_other_files_are_refused(tmp_path):
    with pytest.raises(UsageError, match="no dump found"):
        find_hangs(tmp_path)
    with pytest.raises(UsageError, match="is not a folder"):
        find_hangs(tmp_path / "none")
    (tmp_path / "rank-0.json").write_text('{"version": 1}')
    with pytest.raises(UsageError, match=r"rank-0\.json: not a dump of a rank"):
        find_hangs(tmp_path)[0].read()
    (tmp_path / "rank-0.json").write_text('{"version": 99}')
    with pytest.raises(UsageError, match="version 99, expected 1"):
        find_hangs(tmp_path)[0].read()
