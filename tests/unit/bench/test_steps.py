"""Training steps: options refused before any allocation, and the output on a page and on a terminal."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from commlib.bench.options import BenchOptionsError
from commlib.bench.page import page, runs
from commlib.bench.steps import run
from commlib.bench.steps.contract import StepSizes, check, layers_of_stages
from tests.unit.bench import sweeps

WRONG = {
    "kind": (("ddp", "torch", StepSizes(), 2), "step 'ddp' is unknown; known are dp, tp, pp, moe"),
    "framework": (("dp", "jax", StepSizes(), 2), "--framework 'jax' is unknown; known are torch, tensorflow"),
    "nothing": (("dp", "torch", StepSizes(rows=0), 2), "--rows is 0: expected at least 1"),
    "top k": (("moe", "torch", StepSizes(top_k=0), 2), "--top-k is 0"),
    "heads": (("dp", "torch", StepSizes(heads=7), 2), "--heads 7 does not divide --width 256"),
    "shared heads": (("tp", "torch", StepSizes(), 3), "--heads 8 is not divisible by 3 ranks: give a multiple of 3"),
    "experts": (("moe", "torch", StepSizes(), 3), "--experts 8 cannot be divided equally among 3 ranks"),
    "few experts": (("moe", "torch", StepSizes(experts=2), 2), "at least --top-k 2 each"),
    "layers": (("pp", "torch", StepSizes(layers=1), 2), "--layers is 1: expected at least one for each of 2 ranks"),
    "rows": (("pp", "torch", StepSizes(rows=6), 2), "--microbatches 4 does not divide --rows 6"),
}


@pytest.mark.parametrize("case", WRONG)
def test_impossible_options_are_refused(case):
    given, message = WRONG[case]
    with pytest.raises(BenchOptionsError, match=re.escape(message)):
        check(*given)


def test_tokens_count_all_batches_of_a_step():
    """Ranks have a batch each, or all have one."""
    sizes = StepSizes(rows=4, context=8)
    assert {kind: sizes.tokens(kind, 3) for kind in ("dp", "tp", "pp", "moe")} == {
        "dp": 96,
        "tp": 32,
        "pp": 32,
        "moe": 96,
    }


@pytest.mark.parametrize("kind", ["dp", "tp", "pp", "moe"])
def test_the_defaults_are_valid(kind):
    for ranks in (1, 2, 4):
        check(kind, "torch", StepSizes(), ranks)


def test_layers_are_shared_evenly():
    assert layers_of_stages(4, 4) == [1, 1, 1, 1]
    assert sorted(layers_of_stages(7, 3)) == [2, 2, 3]
    assert sum(layers_of_stages(5, 4)) == 5 and min(layers_of_stages(5, 4)) == 1


LINE = {
    "kind": "step",
    "key": "step dp torch 2 ranks",
    "kind_of_step": "dp",
    "framework": "torch",
    "ranks": 2,
    "model": replace(StepSizes(), rows=4).text("dp"),
    "parameters": 3_310_000,
    "status": "ok",
    "difference": 1e-7,
    "seconds": {"commlib": [0.010, 0.010, 0.010]},
    "step": 0.010,
    "tokens_per_second": 51200.0,
    "alone": 0.008,
    "exposed": 0.002,
    "peer": "torch DDP over gloo",
    "peer_step": 0.015,
    "ratio": 1.5,
}


def test_steps_are_on_the_page(tmp_path):
    path = tmp_path / "steps.jsonl"
    alone = {
        **LINE,
        "key": "other",
        "kind_of_step": "pp",
        "status": "wrong",
        "peer": "",
        "peer_step": None,
        "ratio": None,
    }
    path.write_text("".join(json.dumps(line) + "\n" for line in (sweeps.header(), LINE, alone)))
    text = page.render([runs.read(path)])
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", text[text.index('data-name="steps"') :])
    assert cells[:12] == [
        *("dp", "torch", "2", "4 layers of 256, 8 heads, 4 x 64 tokens", "10.0 ms", "51,200", "8.00 ms", "2.00 ms"),
        *("20%", "torch DDP over gloo", "15.0 ms", "1.50"),
    ]
    assert cells[12] == "pp WRONG" and cells[21:24] == ["-", "-", "-"]


def test_steps_of_two_runs_are_compared(tmp_path):
    slower = {**LINE, "step": 0.020, "seconds": {"commlib": [0.020, 0.020, 0.021]}}
    for name, line in {"before": LINE, "after": slower}.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(one) + "\n" for one in (sweeps.header(), line)))
    text = page.render([runs.read(tmp_path / f"{name}.jsonl") for name in ("before", "after")])
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", text[text.index('data-name="compared steps"') :])
    assert cells[4:8] == ["10.0 ms", "20.0 ms", "0.50", "slower"]


def test_steps_are_printed(capsys):
    run.show(LINE, sweeps.FACTS)
    printed = capsys.readouterr().out
    assert "exposed  2.00 ms, 20% of the step" in printed and "1.50 times commlib's" in printed
    assert "losses  same as in one process: they differ by 1.0e-07" in printed
    run.show({**LINE, "status": "wrong", "difference": None, "exposed": -0.001}, sweeps.FACTS)
    printed = capsys.readouterr().out
    assert "losses  NOT as in one process: they differ by not finite" in printed and "-1.00 ms, -10%" in printed
