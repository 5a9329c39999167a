"""Each rule of a plan is broken once, and the error names the rule; accepted plans follow it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commlib.errors import UsageError
from commlib.tensor_parallel import Column, Plan, Replicate, Row, Sequence, Vocabulary
from commlib.tensor_parallel.rules import RULES, PlanError, check
from tests.inputs.traces import WrittenTrace

PAIR: Plan = {"up": Column(), "down": Row()}
IN_SEQUENCE: Plan = {"norm": Sequence(1), "up": Column(sequence=1), "down": Row(sequence=1)}


def refused(trace, plan, rule, *messages, **options):
    with pytest.raises(PlanError) as caught:
        check(trace, plan, **options)
    assert caught.value.rule == rule, caught.value
    assert RULES[rule] in str(caught.value)
    for words in messages:
        assert words in str(caught.value)


def mlp(between=None, last=True, rank=3):
    m = WrittenTrace()
    x = m.given(*(2, 5, 8)[-rank:])
    h = m.pointwise(m.linear("up", x, 16), text="gelu")
    if between is not None:
        h = between(m, h)
    return m.trace(m.linear("down", h, 8) if last else h)


def test_a_pair_is_accepted():
    checked = check(mlp(), PAIR)
    assert [state.name for state in checked.states.values()] == ["whole", "features", "features", "whole"]
    assert not checked.doubts


@pytest.mark.parametrize("plan", [{}, {"up": Column(gather=True)}, {"up": Replicate()}, {"down": Row(split=True)}])
def test_whole_layers_are_accepted(plan):
    check(mlp(), plan)


def test_a_column_without_its_row_is_refused():
    refused(mlp(), {"up": Column()}, "whole", "down (Linear)", "by up", "give it Row(), or set gather=True for up")


def test_a_row_without_its_column_is_refused():
    refused(mlp(), {"down": Row()}, "row", "down (Linear)", "split=True")


def test_a_row_accepts_input_that_a_caller_has_divided():
    m = WrittenTrace()
    check(m.trace(m.linear("down", m.given(5, 4), 8), whole=False), {"down": Row()})


def test_two_columns_in_a_row_are_refused():
    refused(mlp(), {"up": Column(), "down": Column()}, "column", "put a Row between up and this")


def test_splitting_divided_features_is_refused():
    refused(mlp(), {"up": Column(), "down": Row(split=True)}, "row", "remove split")


@pytest.mark.parametrize("name", ["softmax", "norm", "mean"])
def test_operations_over_divided_features_are_refused(name):
    operations = {
        "softmax": lambda m, h: m.softmax(h),
        "norm": lambda m, h: m.norm("norm", h),
        "mean": lambda m, h: m.pointwise(h, m.step("", "reshape", [m.mean(h, -1)], [(2, 5, 1)])[0]),
    }
    refused(mlp(operations[name]), PAIR, "partial" if name == "mean" else "needs", "by up")


def test_operations_over_another_dimension_are_accepted():
    check(mlp(lambda m, h: m.softmax(h, 1)), PAIR)
    refused(mlp(lambda m, h: m.pick(h, -1), last=False), {"up": Column()}, "needs", "select")


def test_a_mean_of_divided_features_is_refused_as_a_result():
    m = WrittenTrace()
    refused(m.trace(m.mean(m.linear("up", m.given(5, 8), 16), -1)), {"up": Column()}, "partial", "returns")


def test_an_output_that_stays_divided_is_refused():
    trace = mlp(last=False)
    refused(trace, {"up": Column()}, "output", "gather=True", "divided_output=True")
    check(trace, {"up": Column()}, divided_output=True)
    check(trace, {"up": Vocabulary()})
    check(trace, {"up": Vocabulary(gather=True)})


def test_a_model_that_is_one_layer_may_stay_divided():
    m = WrittenTrace()
    check(m.trace(m.linear("", m.given(5, 8), 16)), {"": Column()})


def test_whole_and_divided_do_not_add_up():
    m = WrittenTrace()
    x = m.given(5, 8)
    gate, up = m.linear("gate", x, 16), m.linear("up", x, 16)
    trace = m.trace(m.linear("down", m.pointwise(gate, up, text="mul"), 8))
    refused(trace, PAIR, "match", "mul", "by up")
    check(trace, {**PAIR, "gate": Column()})


def test_a_weight_for_each_feature_is_refused():
    refused(mlp(lambda m, h: m.pointwise(h, m.weight("scale", 16))), PAIR, "match", "an unsharded weight")
    refused(mlp(lambda m, h: m.pointwise(h, m.weight("scale", 1))), PAIR, "gradient", "a partial gradient of it")
    refused(mlp(lambda m, h: m.prelu("slope", h)), PAIR, "gradient", "slope (PReLU)", "Sequence(2)")


def test_constants_without_the_divided_dimension_are_accepted():
    check(mlp(lambda m, h: m.pointwise(h, m.constant(5, 1), text="where")), PAIR)
    refused(mlp(lambda m, h: m.pointwise(h, m.constant(16))), PAIR, "match", "a constant")


def test_dropout_of_divided_values_needs_different_numbers():
    trace = mlp(lambda m, h: m.dropout("drop", h))
    refused(trace, PAIR, "draws", "drop (Dropout)", "Sequence(2)")
    check(trace, {**PAIR, "drop": Sequence(-1)})


def test_dropout_of_whole_values_needs_the_same_numbers():
    m = WrittenTrace()
    h = m.dropout("drop", m.linear("first", m.given(5, 8), 8))
    refused(m.trace(h), {"drop": Sequence(0)}, "same")


def block(between=None):
    """A block whose residual stream is divided along its sequence by Row(sequence=1) of an embedding."""
    m = WrittenTrace()
    x = m.table("words", m.given(2, 6), 40, 8)
    h = m.linear("up", m.norm("norm", x), 16)
    y = m.pointwise(x, m.linear("down", m.pointwise(h, text="gelu"), 8))
    y = y if between is None else between(m, y)
    return m.trace(m.linear("head", y, 40))


def test_a_region_can_be_divided_along_its_sequence():
    plan: Plan = {"words": Vocabulary(sequence=1), **IN_SEQUENCE, "head": Vocabulary(gather=True, sequence=1)}
    check(block(), plan)
    refused(block(), {**plan, "words": Vocabulary()}, "count", "norm (LayerNorm)", "remove it from the plan")
    refused(block(), {**plan, "up": Column()}, "column", "sequence=1")
    refused(block(), {**plan, "up": Column(sequence=0)}, "sequence", "dimension 1")
    refused(block(), {**plan, "down": Row()}, "match", "add")
    refused(block(), {**plan, "head": Replicate()}, "gradient", "head (Linear)")
    refused(block(), {name: style for name, style in plan.items() if name != "norm"}, "gradient", "Sequence(1)")
    refused(block(lambda m, y: m.pointwise(y, m.weight("scale", 8))), plan, "gradient", "input 1")
    refused(block(lambda m, y: m.pick(y, 1)), plan, "needs", "gather along the sequence")
    refused(block(lambda m, y: m.pointwise(y, m.constant(6, 1))), plan, "match", "a constant")
    refused(block(lambda m, y: m.attention("mixer", y, 2)), plan, "whole", "mixer")
    refused(block(lambda m, y: m.dropout("drop", y)), plan, "draws", "Sequence(1)")
    check(block(lambda m, y: m.dropout("drop", y)), {**plan, "drop": Sequence()})
    check(block(lambda m, y: m.attention("mixer", y, 2)), {**plan, "mixer": Column(sequence=1)})


def test_a_norm_of_a_part_is_refused():
    m = WrittenTrace()
    refused(m.trace(m.norm("norm", m.given(2, 6, 8))), {"norm": Sequence(-1)}, "needs", "a part of the features")


def test_an_output_is_divided_along_a_sequence_only_if_the_input_is():
    m = WrittenTrace()
    trace = m.trace(m.linear("down", m.linear("up", m.norm("norm", m.given(2, 6, 8)), 16), 8))
    check(trace, IN_SEQUENCE)
    refused(mlp(), {"up": Column(), "down": Row(sequence=1)}, "output", "without sequence=")


def attention(kv=4, parts=None, replicate=False):
    m = WrittenTrace()
    x = m.given(2, 5, 16)
    if parts is None:
        q, k, v = (m.linear(name, x, 4 * heads) for name, heads in (("q", 4), ("k", kv), ("v", kv)))
    else:
        q, k, v = m.split(m.linear("qkv", x, 48), 16, 16, 16)
    q, k, v = m.heads(q, 4), m.heads(k, kv), m.heads(v, kv)
    scores = m.softmax(m.pointwise(m.matmul(q, m.permute(k, 0, 1, 3, 2)), m.constant(5, 5)))
    return m.trace(m.linear("o", m.joined(m.matmul(scores, v)), 16))


QKV: Plan = {"q": Column(units=4), "k": Column(units=4), "v": Column(units=4), "o": Row(units=4)}


def test_heads_are_divided():
    check(attention(), QKV)
    check(attention(parts=3), {"qkv": Column(parts=3, units=4), "o": Row(units=4)})
    refused(attention(), {**QKV, "k": Replicate()}, "match", "by q")


def test_fused_features_are_divided_part_by_part():
    trace = attention(parts=3)
    refused(trace, {"qkv": Column(units=4), "o": Row()}, "parts", "chunk", "Column(parts=3)")
    refused(trace, {"qkv": Column(parts=2), "o": Row()}, "parts", "qkv has 2 parts")
    refused(mlp(), {"up": Column(parts=2), "down": Row()}, "parts", "split them before it")


def test_parts_may_be_a_dimension():
    m = WrittenTrace()
    cut = m.reshape(m.linear("qkv", m.given(2, 5, 16), 48), 2, 5, 3, 4, 4)
    q, k, v = (m.pick(m.permute(cut, 2, 0, 3, 1, 4), 0) for _ in range(3))
    trace = m.trace(m.linear("o", m.joined(m.attend(q, k, v)), 16))
    check(trace, {"qkv": Column(parts=3, units=4), "o": Row()})
    refused(trace, {"qkv": Column(), "o": Row()}, "needs", "select")


def test_one_head_of_keys_serves_all_queries():
    plan: Plan = {"q": Column(units=4), "o": Row(units=4)}
    shared = Replicate(into_sharded=True)
    trace = attention(kv=1)
    refused(trace, plan, "gradient", "Replicate(into_sharded=True)")
    check(trace, {**plan, "k": shared, "v": shared})
    refused(mlp(), {"up": shared}, "count", "remove into_sharded")


def test_products_over_divided_features_are_partial():
    m = WrittenTrace()
    x = m.given(2, 5, 16)
    q, k = m.linear("q", x, 16), m.linear("k", x, 16)
    scores = m.softmax(m.matmul(q, m.permute(k, 0, 2, 1)))
    trace = m.trace(m.linear("o", scores, 8))
    refused(trace, {"q": Column(), "k": Column()}, "partial", "matmul")
    check(trace, {"q": Column(gather=True), "k": Column(gather=True)})


def test_joined_features_are_fused():
    m = WrittenTrace()
    x = m.given(5, 8)
    both = m.cat(m.linear("a", x, 8), m.linear("b", x, 8))
    trace = m.trace(m.linear("down", both, 8))
    refused(trace, {"a": Column(), "b": Column(), "down": Row()}, "parts", "2 of them still")
    refused(trace, {"a": Column(), "down": Row()}, "match", "one input is unsharded")
    check(m.trace(m.linear("after", m.cat(x, x, dim=0), 8)), {})


def test_tied_weights_need_one_style():
    m = WrittenTrace()
    trace = m.trace(m.linear("head", m.table("words", m.given(5), 40, 8), 40), tied=[("words", "head")])
    check(trace, {"words": Vocabulary(), "head": Vocabulary(gather=True)})
    check(trace, {"words": Vocabulary(), "head": Column(gather=True)})  # the same rows of the same weight
    refused(trace, {"words": Vocabulary()}, "tied", "words", "head: unsharded")
    refused(trace, {"words": Column(gather=True), "head": Column(gather=True)}, "tied")
    refused(trace, {"words": Column(gather=True), "head": Vocabulary()}, "tied")


def test_a_divided_weight_is_used_by_its_layer_alone():
    m = WrittenTrace()
    x = m.table("words", m.given(5), 40, 8)
    trace = m.trace(m.matmul(x, m.permute(m.weight("words", 40, 8), 1, 0)))
    refused(trace, {"words": Vocabulary()}, "inside", "words's weight")
    check(trace, {})


def test_a_table_is_looked_up_before_division():
    m = WrittenTrace()
    trace = m.trace(m.table("words", m.pointwise(m.linear("up", m.given(5, 8), 4)), 40, 8))
    refused(trace, {"up": Column()}, "gradient", "words (Embedding)")


def test_heads_of_a_rank_are_those_of_the_whole():
    """A model with a fixed number of heads groups the features of a rank into different heads."""

    def of(heads, features):
        m = WrittenTrace()
        (q,) = m.step("q", "product", [m.given(2, 5, 16)], [(2, 5, 10)], size=(16, 20))  # half of 4 heads of 5 features
        return m.trace(m.reshape(q, 2, 5, heads, features), whole=False)

    refused(of(5, 2), {"q": Column(units=4)}, "heads", "units of 5", divided_output=True)
    assert not check(of(2, 5), {"q": Column(units=4)}, divided_output=True).doubts
    for units in (0, 2):  # 2: heads of keys, which two queries share
        (doubt,) = check(of(2, 5), {"q": Column(units=units)}, divided_output=True).doubts
        assert "fixed number of heads" in f"{doubt}"


def test_unknown_operations_give_a_doubt():
    trace = mlp(lambda m, h: m.softmax(m.unknown(h)))
    checked = check(trace, PAIR)
    assert [state.name for state in checked.states.values()][3:5] == ["unknown", "unknown"]
    check(trace, {"up": Column()})
    (doubt,) = checked.doubts  # later steps add no other doubt
    assert "its input is sharded along dimension 2 (by up)" in f"{doubt}"
    assert not check(trace, {}).doubts


def test_numbers_of_a_part_give_a_doubt():
    m = WrittenTrace()
    h = m.linear("up", m.given(3, 8), 12)
    m.step("", "number", [m.mean(h, 1)], [], text="item")
    (doubt,) = check(m.trace(m.linear("down", h, 8)), PAIR).doubts
    assert doubt.step.text == "item" and doubt.state.source == "up"


def test_errors_are_usage_errors():
    with pytest.raises(UsageError, match=r"plan: down \(Linear\): a Row takes"):
        check(mlp(), {"down": Row()})


def test_an_empty_cache_can_be_joined_with_divided_values():
    m = WrittenTrace()
    keys = m.permute(m.reshape(m.linear("k", m.given(2, 5, 8), 8), 2, 5, 4, 2), 0, 2, 1, 3)
    cached = m.step("", "join", [m.constant(0), keys], [(2, 4, 5, 2)], dim=2)[0]
    assert check(m.trace(cached), {"k": Column()}, divided_output=True).states[cached].dim == 1


def test_a_rank_may_have_one_head():
    """-1 is the number of heads, even if it is 1; only the dimension of length 1 is repeated."""
    m = WrittenTrace()
    q = m.heads(m.linear("q", m.given(2, 5, 8), 4), 1)
    turned = m.pointwise(q, m.constant(1, 1, 5, 4), text="mul")
    m.linear("o", m.joined(turned), 8)
    checked = check(m.trace(whole=False), {"q": Column(), "o": Row()})
    assert checked.states[turned].dim == 1 and not checked.doubts


def test_integers_have_no_gradient():
    """A mask computed from activations is combined with divided values."""
    m = WrittenTrace()
    x = m.given(2, 5, 8)
    mask = m.pointwise(m.linear("gate", x, 1), text="gt")
    m.linear("down", m.pointwise(m.linear("up", x, 8), mask, text="mul"), 8)
    with pytest.raises(PlanError, match="gradient"):
        check(m.trace(), PAIR)
    check(replace(m.trace(), discrete=frozenset([mask])), PAIR)


@pytest.mark.parametrize("queries", [4, 6])
def test_heads_that_ranks_share_serve_as_many_on_each(queries):
    """With 6 heads of queries on 4 ranks, one rank's would need both of two heads of keys."""
    m = WrittenTrace()
    x = m.given(2, 5, 8)
    q, k, v = (m.heads(m.linear(name, x, 4 * count), count) for name, count in (("q", queries), ("k", 2), ("v", 2)))
    m.linear("o", m.joined(m.attend(q, k, v)), 8)
    plan: Plan = {"q": Column(units=queries), **dict.fromkeys("kv", Column(units=2)), "o": Row(units=queries)}
    if queries == 4:
        check(m.trace(), plan, size=4)
        check(m.trace(), plan, size=2)
    else:
        refused(m.trace(), plan, "heads", "k has 2 heads that ranks share, and q 6", size=4)


def test_a_row_refuses_shared_heads():
    refused(mlp(), {"up": Column(units=2), "down": Row()}, "heads", "with parts that ranks share", size=4)


def test_shared_values_are_counted_and_drawn_once():
    """A penalty would count it once per rank that has it, and dropout would drop different elements on each rank."""
    m = WrittenTrace()
    penalized = m.linear("k", m.given(2, 5, 8), 8)
    m.step("", "penalty", [penalized], [()])
    plan: Plan = {"k": Column(units=2)}
    refused(m.trace(), plan, "count", "with parts that ranks share", size=4)
    check(m.trace(), plan, size=2)
    m = WrittenTrace()
    m.dropout("drop", m.linear("k", m.given(2, 5, 8), 8))
    plan = {**plan, "drop": Sequence(-1)}
    refused(m.trace(), plan, "draws", "would draw different numbers", size=4)
    check(m.trace(), plan, size=2)


def keeping(make, **more):
    """Return the trace of a pair of layers that keeps a value which `make` computes from the features."""
    m = WrittenTrace()
    h = m.linear("up", m.given(2, 5, 8), 16)
    value = make(m, h)
    return replace(m.trace(m.linear("down", h, 8), kept=[value]), **{name: one(value) for name, one in more.items()})


KEPT = {"features": lambda m, h: h, "partial": lambda m, h: m.mean(m.pointwise(h, text="abs"), -1)}


@pytest.mark.parametrize("make", KEPT.values(), ids=KEPT)
def test_keeping_a_part_is_refused(make):
    refused(keeping(make), PAIR, "retained", "(by ", "divided_output=True")
    check(keeping(make), PAIR, divided_output=True)
    check(keeping(make), {})


@pytest.mark.parametrize("make", [*KEPT.values(), lambda m, h: m.unknown(h)], ids=[*KEPT, "unknown"])
def test_keeping_a_part_without_a_gradient_gives_a_doubt(make):
    trace = keeping(make, detached=lambda value: frozenset([value]))
    *_, doubt = check(trace, PAIR).doubts
    assert doubt.stays and "each rank keeps a different value" in f"{doubt}"
    assert doubt not in check(trace, PAIR, divided_output=True).doubts


def test_divided_logits_and_whole_values_may_be_kept():
    check(keeping(lambda m, h: m.linear("down", h, 8)), PAIR)
    m = WrittenTrace()
    x = m.linear("mix", m.given(2, 5, 8), 8)
    check(m.trace(x, kept=[m.linear("words", x, 16)]), {"words": Vocabulary()})


def test_values_combined_with_parts_are_kept_only_without_gradient():
    m = WrittenTrace()
    key = m.linear("key", m.given(2, 5, 8), 4)
    trace = m.trace(m.linear("last", m.given(2, 5, 8), 8), kept=[key])
    plan: Plan = {"key": Replicate(into_sharded=True)}
    refused(trace, plan, "count", "remove into_sharded")
    assert not check(replace(trace, detached=frozenset([key])), plan).doubts
