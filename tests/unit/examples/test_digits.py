"""The demo explains a result that looks wrong: several ranks slower than one process."""

from __future__ import annotations

import importlib.util
from pathlib import Path

FILE = Path(__file__).parents[3] / "examples" / "digits.py"
spec = importlib.util.spec_from_file_location("digits_of_the_examples", FILE)
assert spec is not None and spec.loader is not None
digits = importlib.util.module_from_spec(spec)
spec.loader.exec_module(digits)


def test_faster_ranks_get_no_explanation():
    assert digits.explain_slowdown(2, 5.0, 9.0, load=7.5, cores=2) == ""


def test_busy_cores_are_named_with_figures_and_a_remedy():
    text = digits.explain_slowdown(2, 12.0, 8.0, load=7.5, cores=2)
    assert text.startswith("2 ranks took 1.50 times as long as one process, because the cores are busy")
    assert "load is 7.5 on 2 cores" in text and text.endswith("Run it again when the load is below 2.")


def test_shared_cores_are_named_whatever_the_load():
    assert "because they share 2 cores" in digits.explain_slowdown(4, 12.0, 8.0, load=4.5, cores=2)
    assert "share 1 core:" in digits.explain_slowdown(2, 12.0, 8.0, load=0.5, cores=1)


def test_an_idle_machine_is_not_blamed():
    text = digits.explain_slowdown(2, 12.0, 8.0, load=1.0, cores=2)
    assert "busy" not in text and "the load is only 1.0 on 2 cores" in text


def test_the_load_is_read_from_this_machine():
    load, cores = digits.find_load()
    assert load >= 0 and cores >= 1
