"""Waits between ranks, hidden time, the critical path, advice; and their output."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from commlib.cli.app import app
from commlib.cli.trace_text import summary_text
from commlib.trace.advice import RULES, advise
from commlib.trace.files import read_all
from commlib.trace.intervals import common, length, union
from commlib.trace.operations import read_activity
from commlib.trace.summary import summarise
from tests.inputs.timelines import RankTimeline


def summed(tmp_path, *ranks):
    names = [rank.write(tmp_path / f"t{rank.rank}.json") for rank in ranks]
    traces, _ = read_all(names)
    return summarise([read_activity(trace) for trace in traces])


def ms(seconds):
    return pytest.approx(seconds / 1e3, abs=1e-6)


def path_of(summary):
    return {(part.rank, part.what): part.seconds for part in summary.steps.path}


def test_sets_of_times_can_be_combined():
    assert union([(5, 7), (1, 3), (3, 4), (6, 6), (2, 3), (9, 8)]) == [(1, 4), (5, 7)]
    assert common([(0, 10), (20, 30)], [(5, 22), (29, 40)]) == [(5, 10), (20, 22), (29, 30)]
    assert length([(1, 4), (5, 7)]) == 5 and common([], [(1, 2)]) == []


def late_rank():
    """Rank 2 is 8 ms late in each of 10 collectives, which then take 1 ms."""
    ranks = [RankTimeline(rank) for rank in range(3)]
    for number in range(1, 11):
        at = 20 * number
        for rank in ranks:
            rank.blocking("all_reduce", number, at + 8 * (rank.rank == 2), at + 9, nbytes=1 << 20)
            rank.step(at + 10)
    return ranks


def test_waits_between_ranks_are_summed(tmp_path):
    summary = summed(tmp_path, *late_rank())
    assert [rank.lost for rank in summary.ranks] == [ms(80), ms(80), ms(0)]
    assert [rank.lost_for for rank in summary.ranks] == [{2: ms(80)}, {2: ms(80)}, {}]
    assert [rank.late_count for rank in summary.ranks] == [0, 0, 20] and summary.ranks[2].caused_wait == ms(160)
    assert [rank.exposed for rank in summary.ranks] == [ms(90), ms(90), ms(10)]
    assert [rank.moving for rank in summary.ranks] == [ms(10)] * 3 and summary.ranks[0].hidden == ms(0)
    assert summary.collectives == 10 and summary.verbs[0].verb == "all_reduce" and summary.verbs[0].calls == 30
    assert any("rank 2 keeps the others waiting" in text and "100%" in text for text in summary.advice)


def test_the_critical_path_goes_through_the_late_rank(tmp_path):
    summary = summed(tmp_path, *late_rank())
    assert (summary.steps.marked_by, summary.steps.count, summary.steps.seconds) == ("user", 10, ms(20))
    path = path_of(summary)
    assert path[2, "computes"] == ms(18) and sum(path.values()) == ms(20)
    assert sum(took for (_, what), took in path.items() if what == "all_reduce") == ms(1)


def test_a_rank_late_by_less_than_the_wake_up_spread_is_not_blamed(tmp_path):
    ranks = [RankTimeline(0), RankTimeline(1)]
    for number in range(1, 11):
        for rank in ranks:
            rank.blocking("barrier", number, 10 * number + 0.015 * rank.rank, 10 * number + 0.02)
    summary = summed(tmp_path, *ranks)
    assert [(rank.late_count, rank.lost) for rank in summary.ranks] == [(0, 0), (0, 0)]


def test_time_behind_the_program_is_hidden(tmp_path):
    """It ran from 10 to 30, and was waited for from 25 to 30; the other rank arrived at 15, before the wait."""
    ranks = [RankTimeline(0), RankTimeline(1)]
    ranks[0].started("all_reduce", 1, 10, 10, 30, waits=(25, 30))
    ranks[1].started("all_reduce", 1, 15, 15, 30, waits=(29, 30))
    for rank in ranks:
        rank.step(0)
        rank.step(40)
    summary = summed(tmp_path, *ranks)
    first = summary.ranks[0]
    assert (first.communication, first.exposed, first.hidden, first.lost) == (ms(20), ms(5), ms(15), ms(0))
    # Back from 40: the last rank computes, data moves after rank 1 has arrived, and rank 1 launched at 15.
    path = path_of(summary)
    assert sum(took for (_, what), took in path.items() if what == "all_reduce") == ms(15)
    assert path[1, "computes"] >= 15e-3 - 1e-6 and sum(path.values()) == ms(40)


def test_the_path_follows_the_queue(tmp_path):
    """Two launched at once: the second waits for the turn of the first, which rank 1 launched late."""
    ranks = [RankTimeline(0), RankTimeline(1)]
    for rank, launched in zip(ranks, (10, 20), strict=True):
        rank.step(0)
        rank.started("all_reduce", 1, launched, launched, 30)
        rank.started("all_gather", 2, launched + 1, 30, 35, waits=(launched + 2, 35))
        rank.step(36)
    assert path_of(summed(tmp_path, *ranks)) == {
        (1, "computes"): ms(20),
        (0, "all_reduce"): ms(10),
        (0, "all_gather"): ms(5),
        (0, "computes"): ms(1),
    }


def test_roots_wait_and_are_waited_for(tmp_path):
    ranks = [RankTimeline(rank) for rank in range(3)]
    for rank, began in zip(ranks, (10, 4, 20), strict=True):
        rank.blocking("broadcast", 1, began, 21, text="broadcast of 3 x float32, root=0")
        rank.blocking("gather", 2, began + 30, 51, text="gather of 3 x float32, root=1")
        rank.blocking("scan", 3, began + 60, 81, text="scan")
    summary = summed(tmp_path, *ranks)
    # 1 waits for the root 0 in the broadcast; in the gather the root 1 waits for 2; the waits in a scan are unknown.
    assert [rank.lost_for for rank in summary.ranks] == [{}, {0: ms(6), 2: ms(16)}, {}]


def test_stages_wait_for_messages(tmp_path):
    ranks = [RankTimeline(0), RankTimeline(1)]
    facts = {"calls": "world", "microbatch": 0}
    ranks[0].span("pipeline", "0F0", 0, 30, **facts, kind="F", stage=0, peer=-1)
    ranks[0].span("pipeline", "0SEND_F0", 30, 31, **facts, kind="SEND_F", stage=0, peer=1)
    ranks[1].span("pipeline", "1RECV_F0", 2, 32, **facts, kind="RECV_F", stage=1, peer=0)
    ranks[1].span("pipeline", "1F0", 32, 40, **facts, kind="F", stage=1, peer=-1)
    summary = summed(tmp_path, *ranks)
    assert summary.ranks[1].lost_for == {0: ms(28)} and summary.ranks[0].caused_wait == ms(28)
    assert any("pipeline stages wait" in text for text in summary.advice)
    assert path_of(summary) == {(0, "computes"): ms(30), (1, "message of a pipeline"): ms(2), (1, "computes"): ms(8)}


def test_experts_and_codecs_get_advice(tmp_path):
    rank = RankTimeline(0)
    rank.load("layers.3", 10, 0, 0, 0)
    rank.load("layers.3", 30, 0, 40, 0)
    rank.blocking("all_reduce", 1, 0, 10)
    rank.span("codec", "encode", 1, 8)
    summary = summed(tmp_path, rank)
    assert summary.ranks[0].codec == ms(7) and any("encoding and decoding take 70%" in text for text in summary.advice)
    assert any("the busiest expert of layers.3 gets 2.0 times the mean" in text for text in summary.advice)
    assert any("the file of one rank only: pass the files of all" in note for note in summary.notes)


def test_every_rule_can_give_advice():
    """With the worst figures each rule has its text; with all figures at 0 there is no advice."""
    names = {name for rule in RULES for name in (rule.measure, rule.gain)}
    for rule in RULES:
        bad: dict[str, Any] = {
            **dict.fromkeys(names, 0.0),
            rule.gain: 0.5,
            rule.measure: 5.0,
            "worst": 3,
            "busiest": "m",
        }
        assert any(text.startswith(rule.text[:12]) or "{" in rule.text[:12] for text in advise(bad).texts)
        assert not any("{" in text for text in advise(bad).texts)
    nothing = advise({**dict.fromkeys(names, 0.0), "worst": 0})
    assert nothing.texts == [] and nothing.small == []


def test_less_than_two_percent_of_a_step_gets_no_advice():
    """Encoding was advised on if it took a third of the communication, though communication took 1 % of a step."""
    figures: dict[str, Any] = {"codec_share": 0.9, "codec_of_step": 0.019, "worst": 0}
    assert advise(figures).texts == [] and advise(figures).small == ["encoding (1.9%)"]
    (text,) = advise({**figures, "codec_of_step": 0.02}).texts
    assert text.startswith("encoding and decoding take 90%") and text.endswith("(2% of a step)")


def test_the_largest_share_of_a_step_comes_first():
    figures = {"moving_share": 0.2, "codec_share": 0.5, "codec_of_step": 0.4, "worst": 0}
    assert [text.split()[0] for text in advise(figures).texts] == ["encoding", "threads"]


def compiling(*, slow_steps):
    """Rank 1 compiles for a second in the first steps, for which rank 0 waits; then steps take 10 ms."""
    ranks = [RankTimeline(0), RankTimeline(1)]
    at = 0.0
    for number in range(1, 13):
        compiled = 1000 if number <= slow_steps else 0
        for rank in ranks:
            rank.blocking("all_reduce", number, at + 9 + compiled * rank.rank, at + 9.1 + compiled, nbytes=1 << 20)
            rank.step(at + 10 + compiled)
        at += 10 + compiled
    return ranks


@pytest.mark.parametrize(("slow_steps", "first"), [(1, "step 1 (1.01 s)"), (3, "steps 1 to 3 (3.03 s)")])
def test_start_up_gets_no_advice_and_is_named(tmp_path, slow_steps, first):
    """A rank that compiled for a second was blamed for keeping the others waiting in all steps."""
    summary = summed(tmp_path, *compiling(slow_steps=slow_steps))
    assert summary.ranks[1].caused_wait > 0.9 * slow_steps  # the table has the whole run
    assert summary.advice == ()
    assert summary_text(summary, None).endswith(f"\n\nThe advice leaves out start-up until the end of {first}.")


def test_without_marks_all_time_counts(tmp_path):
    ranks = [RankTimeline(0), RankTimeline(1)]
    for number in range(1, 4):
        for rank in ranks:
            rank.blocking("barrier", number, 100 * number + 50 * rank.rank, 100 * number + 60)
    summary = summed(tmp_path, *ranks)
    assert "leaves out" not in summary_text(summary, None)
    assert any("rank 1 keeps the others waiting" in text for text in summary.advice)


def test_time_after_the_last_step_is_excluded_and_named(tmp_path):
    ranks = late_rank()
    for rank in ranks:
        rank.blocking("barrier", 11, 300 + 400 * (rank.rank == 0), 701)
    summary = summed(tmp_path, *ranks)
    assert (summary.left_out.steps, summary.left_out.start_up, summary.left_out.after) == (1, ms(30), ms(491))
    assert "end of step 1 (30.0 ms); 491 ms after step 10." in summary_text(summary, None)
    (text,) = summary.advice
    assert "rank 2 keeps" in text and text.endswith("(27% of a step)")


def test_the_summary_is_printed(tmp_path):
    names = [rank.write(tmp_path / f"t{rank.rank}.json") for rank in late_rank()]
    text = CliRunner().invoke(app, ["trace", "summary", *names], catch_exceptions=False).output
    assert "rank 0 for rank 2 80.0 ms" in text and "10 steps; step 2 took the median of 20.0 ms" in text
    assert "rank 2 computes" in text and "What to try:\n- rank 2 keeps" in text
    assert text.endswith("\n\nThe advice leaves out start-up until the end of step 1 (30.0 ms).\n")
    data = json.loads(CliRunner().invoke(app, ["trace", "summary", *names, "--json"], catch_exceptions=False).output)
    assert data["ranks"][2]["late_count"] == 20 and data["steps"]["path"][0]["what"] == "computes"
    (tmp_path / "x").write_text("x")
    done = CliRunner().invoke(app, ["trace", "summary", str(tmp_path / "x")])
    assert done.exit_code != 0


def test_a_run_without_marks_counts_as_one_step_with_a_notice(tmp_path):
    rank = RankTimeline(0)
    rank.blocking("barrier", 1, 0, 10)
    name = rank.write(tmp_path / "t.json")
    text = CliRunner().invoke(app, ["trace", "summary", name], catch_exceptions=False).output
    assert "No steps are marked (commlib.mark_step() marks them); all 10.0 ms as one step" in text
    assert "No rank lost time waiting for another one." in text
