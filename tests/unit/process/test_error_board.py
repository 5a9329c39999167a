"""One failed rank reports, and no message of another rank is lost."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from commlib.process.error_board import ErrorBoard


def board(tmp_path: Path) -> ErrorBoard:
    return ErrorBoard(tmp_path / "errors", tmp_path / "others")


def test_the_first_reports_and_names_ranks_with_the_same_error(tmp_path: Path) -> None:
    board_ = board(tmp_path)
    assert [board_.claim(rank, "UsageError: no") for rank in (2, 0, 1)] == [True, False, False]
    assert board_.leave(0, "UsageError: no", "a report") and not (tmp_path / "others").exists()
    assert board_.others_text(2) == "the same error on ranks 0-1"


def test_another_error_is_saved(tmp_path: Path) -> None:
    board_ = board(tmp_path)
    assert board_.claim(1, "ValueError: a") and not board_.claim(0, "ValueError: b")
    assert board_.leave(0, "ValueError: b", "the whole report")
    assert (tmp_path / "others/error-0.txt").read_text() == "the whole report"
    assert board_.others_text(1) == f"other errors on rank 0, in {tmp_path}/others/error-RANK.txt"


def test_rank_numbers_and_seconds_do_not_make_messages_different(tmp_path: Path) -> None:
    mismatch = "not the same call (call 1; this is rank {}):\n  rank 0: barrier\n  rank 1: scan"
    stall = "world: barrier: rank {}: gave up after 5.{} s"
    for name, text in (("mismatch", mismatch), ("stall", stall)):
        board_ = board(tmp_path / name)
        assert board_.claim(0, text.format(0, 0)) and not board_.claim(1, text.format(1, 1))
        assert board_.others_text(0) == "the same error on rank 1"


def test_a_consequence_lets_its_cause_report(tmp_path: Path) -> None:
    board_ = board(tmp_path)
    cause = threading.Timer(0.2, board_.claim, [1, "ValueError: out of luck"])
    cause.start()
    assert not board_.claim(0, "PeerError: rank 1 is gone", patience=30)
    cause.join()
    start = time.monotonic()
    assert board(tmp_path / "alone").claim(0, "PeerError: rank 1 is gone", patience=0.1)
    assert 0.1 <= time.monotonic() - start < 10


def test_all_ranks_report_without_a_writable_folder(tmp_path: Path) -> None:
    (tmp_path / "errors").touch()
    (tmp_path / "others").touch()
    board_ = board(tmp_path)
    assert board_.claim(0, "a") and board_.claim(1, "a")
    assert not board_.leave(1, "a", "a report")


def test_exit_codes_are_kept_for_waiting_ranks(tmp_path: Path) -> None:
    board_ = board(tmp_path / "job")
    assert board_.exits() == (0, "")
    for rank, code, text in ((3, 4, "called sys.exit(4)"), (1, 3, "called sys.exit(3)"), (2, 3, "called sys.exit(3)")):
        board_.keep_exit(rank, code, text)
    assert board_.exits() == (3, "ranks 1-2 called sys.exit(3); rank 3 called sys.exit(4)")
    assert board_.others_text(0) == ""
    for rank in (1, 2, 3):
        board_.remove_exit(rank)
    assert not list(tmp_path.iterdir())
