"""The chosen schedule is the fastest that fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commlib.errors import UsageError
from commlib.pipeline.schedule.auto import LayerCosts, choose


def layers(count: int, *, slow: dict[int, float] | None = None) -> LayerCosts:
    times = tuple((slow or {}).get(layer, 1.0) for layer in range(count))
    return LayerCosts(times, times, times, (100,) * count, (10,) * count)


def test_without_a_limit_the_least_idle_schedule_is_chosen() -> None:
    choice = choose(layers(16), 4, 8)
    assert choice.best.timing.seconds <= choice.tried[0].timing.seconds * 1.01
    assert choice.best.schedule.name in choice.why and "idle" in choice.why
    names = {one.schedule.name for one in choice.tried}
    assert names == {"gpipe", "1f1b", "interleaved", "breadth_first", "zb_h1", "zb_v", "dualpipev"}
    assert {one.schedule.stages for one in choice.tried} == {4, 8, 12, 16}


def test_a_limit_excludes_larger_schedules() -> None:
    free = choose(layers(16), 4, 32)
    least = min(one.nbytes for one in free.tried)
    tight = choose(layers(16), 4, 32, memory=least)
    assert tight.best.nbytes == least
    assert all(one.fits == (one.nbytes <= least) for one in tight.tried)
    if tight.best.timing.seconds > free.best.timing.seconds:
        assert f"more than the {least} allowed" in tight.why
    with pytest.raises(UsageError, match=f"no schedule holds at most {least - 1} bytes.*the least is {least}"):
        choose(layers(16), 4, 32, memory=least - 1)


def test_uneven_layers_are_cut_by_their_time() -> None:
    """One layer takes as long as seven others: it gets a stage of its own, so finer cuts gain nothing."""
    choice = choose(layers(8, slow={3: 7.0}), 2, 8)
    one_each = next(one for one in choice.tried if one.schedule.name == "1f1b")
    assert one_each.counts in ((3, 5), (4, 4))
    costs = layers(8, slow={3: 7.0}).of_stages((3, 5))
    assert costs.forward == (3.0, 11.0) and costs.activations == (300, 500)


def test_fewer_layers_than_stages_leave_fewer_schedules() -> None:
    choice = choose(layers(4), 4, 8)
    assert {one.schedule.stages for one in choice.tried} == {4}
    with pytest.raises(UsageError, match="3 layers cannot be cut into stages for 4 ranks"):
        choose(layers(3), 4, 8)


def test_recomputation_takes_longer_and_needs_less_memory() -> None:
    plain = layers(4).of_stages((1, 3))
    full = replace(layers(4), keeps_inputs=True).of_stages((1, 3))
    assert full.input == (2.0, 6.0) and full.weight == plain.weight and full.forward == plain.forward
    assert full.activations == (0, 10), "the batch, and what the first stage gives"
    again = replace(layers(4), again=True)
    assert again.of_stages((1, 3)) == plain
    split = again.of_stages((1, 3), splits=True)
    assert split.input == split.weight == (2.0, 6.0) and split.activations == (0, 10)
    chosen = choose(replace(layers(16), again=True), 4, 8)
    assert chosen.best.schedule.name not in ("zb_h1", "zb_v", "dualpipev"), "computing twice takes longer than waiting"
