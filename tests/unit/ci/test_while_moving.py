"""ci/while_moving.py: a job may run as long as it prints, and is ended soon after it falls silent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "ci" / "while_moving.py"


def start(seconds, *command):
    return subprocess.Popen(
        [sys.executable, SCRIPT, str(seconds), *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(seconds, *command):
    job = start(seconds, *command)
    out, err = job.communicate(timeout=60)
    assert err == ""
    return job.returncode, out


def is_there(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{process}/stat").read_text().split()[2] != "Z"


def assert_ended(process):
    deadline = time.monotonic() + 10
    while is_there(process) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_there(process)


def test_a_slow_job_that_prints_may_run():
    """Time limits ended slow suites: this job takes twice as long as it may be silent."""
    job = start(3, "sh", "-c", "for i in 1 2 3 4 5 6; do printf .; sleep 1; done")
    assert job.stdout.read(1) == "."
    assert job.poll() is None  # passed on at once, not at the end
    assert (job.stdout.read(), job.wait(10)) == (".....", 0)


def test_a_silent_job_is_ended_with_its_children():
    began = time.monotonic()
    code, out = run(1, "sh", "-c", "sleep 300 & echo $!; wait")
    assert code == 124 and time.monotonic() - began < 30
    child, _, message, _ = out.split("\n")
    assert message.startswith("while_moving: no output for 1 s, or") and "ending: sh -c sleep 300" in message
    assert_ended(int(child))


def test_a_job_that_prints_for_ever_is_ended():
    """Warnings of a stall come again and again."""
    code, out = run("30:2", "sh", "-c", "while echo again; do sleep 0.2; done")
    assert code == 124 and out.count("again") >= 2


def test_last_words_are_passed_on():
    """Python prints where it is stuck when it gets a signal to end."""
    program = "import faulthandler, signal, time; faulthandler.register(15, chain=True); print('there', flush=True)"
    code, out = run(2, sys.executable, "-c", f"{program}; time.sleep(300)")
    assert code == 124
    assert "most recent call first" in out.split("while_moving:")[1]


def test_a_job_that_ignores_signals_is_killed():
    program = f"import runpy; m = runpy.run_path({str(SCRIPT)!r}); run = m['run']; run.__globals__['GRACE'] = 0.5; "
    program += "raise SystemExit(run(1, 99, ['sh', '-c', \"trap '' TERM; echo $$; while :; do sleep 1; done\"]))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 124, done.stderr
    assert_ended(int(done.stdout.split()[0]))


@pytest.mark.parametrize(("program", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -15 $$", 143)])
def test_exit_codes_are_passed_on(program, code):
    assert run(30, "sh", "-c", program) == (code, "")


def test_both_outputs_are_passed_on_in_order():
    assert run(30, "sh", "-c", "echo a; echo b >&2; echo c") == (0, "a\nb\nc\n")


def test_processes_left_behind_do_not_delay_the_end():
    began = time.monotonic()
    code, out = run(100, "sh", "-c", "sleep 300 & echo $!")
    assert code == 0 and time.monotonic() - began < 30
    assert_ended(int(out))


def test_a_job_may_close_its_output():
    assert run(30, "sh", "-c", "exec >&- 2>&-; sleep 1; exit 3") == (3, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_end_the_job(number):
    job = start(100, "sh", "-c", "echo $$; sleep 300")
    process = int(job.stdout.readline())
    job.send_signal(number)
    assert job.wait(30) == 128 + number
    assert_ended(process)


def test_without_arguments_it_prints_its_usage():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
    assert done.returncode == 1 and "while_moving.py SECONDS[:MOST] COMMAND" in done.stderr
