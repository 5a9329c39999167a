"""Plans derived from traces of models like transformers, and the reasons why other layers stay whole."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from commlib.tensor_parallel import Column, PerRank, Plan, Replicate, Row, Sequence, Vocabulary
from commlib.tensor_parallel.auto_plan import find_auto_plan
from commlib.tensor_parallel.equations import Equation, pointwise, selection
from commlib.tensor_parallel.lengths import Length, NumberUses
from commlib.tensor_parallel.rules import check
from commlib.tensor_parallel.table import plan_table
from tests.inputs.plan_tables import reason
from tests.inputs.traces import WrittenTrace

WORDS, WIDTH = 40, 16


def auto_plan(trace, size=2, able=lambda name, style: True):
    result = find_auto_plan(trace, size, able)
    check(trace, result.plan)
    return result


def block(m, x, name, *, kv=4, fused=False, gated=False, drop=False):
    y = m.norm(f"{name}.n1", x)
    if fused:
        q, k, v = m.split(m.linear(f"{name}.qkv", y, 3 * WIDTH), WIDTH, WIDTH, WIDTH)
    else:
        q, k, v = (m.linear(f"{name}.{part}", y, 4 * heads) for part, heads in (("q", 4), ("k", kv), ("v", kv)))
    y = m.attend(m.heads(q, 4), m.heads(k, kv), m.heads(v, kv))
    x = m.pointwise(x, m.linear(f"{name}.o", m.joined(y), WIDTH))
    y = m.norm(f"{name}.n2", x)
    h = m.pointwise(m.linear(f"{name}.up", y, 64), text="gelu")
    if gated:
        h = m.pointwise(h, m.linear(f"{name}.gate", y, 64), text="mul")
    if drop:
        h = m.dropout(f"{name}.drop", h)
    return m.pointwise(x, m.linear(f"{name}.down", h, WIDTH))


def language_model(tied=False, **options):
    m = WrittenTrace()
    x = m.pointwise(m.table("words", m.given(2, 5), WORDS, WIDTH), m.table("places", m.constant(5), 32, WIDTH))
    for at in range(2):
        x = block(m, x, f"b{at}", **options)
    return m.trace(m.linear("head", m.norm("last", x), WORDS), tied=[("words", "head")] if tied else [])


ENDS: Plan = {"words": Vocabulary(), "head": Vocabulary(gather=True)}
HEADS: dict[str, Column | Row] = {"q": Column(units=4), "k": Column(units=4), "v": Column(units=4), "o": Row(units=4)}
PAIR: Plan = {"up": Column(), "down": Row()}


def both(styles):
    return {f"b{at}.{name}": style for at in range(2) for name, style in styles.items()}


@pytest.mark.parametrize("tied", [False, True])
def test_a_gpt_is_divided(tied):
    assert auto_plan(language_model(tied)).plan == {**ENDS, **both({**HEADS, **PAIR})}


def test_gated_and_grouped_layers_are_divided():
    """Queries and keys are divided by the heads of keys, the fewer."""
    grouped: Plan = {name: replace(style, units=2) for name, style in HEADS.items()}
    trace = language_model(gated=True, kv=2)
    assert auto_plan(trace).plan == {**ENDS, **both({**grouped, **PAIR, "gate": Column()})}
    reasons = auto_plan(trace, 3).reasons
    assert reasons["b0.k"] == "2 heads for 3 ranks"
    assert auto_plan(trace, 3).plan == {**ENDS, **both({**PAIR, "gate": Column()})}


def test_fused_layers_are_divided():
    heads = {"qkv": Column(parts=3, units=4), "o": Row(units=4)}
    assert auto_plan(language_model(fused=True)).plan == {**ENDS, **both({**heads, **PAIR})}


def test_one_head_of_keys_stays_whole():
    shared = Replicate(into_sharded=True)
    assert auto_plan(language_model(kv=1)).plan == {**ENDS, **both({**HEADS, "k": shared, "v": shared, **PAIR})}


def test_dropout_between_a_pair_is_divided():
    plan = auto_plan(language_model(drop=True)).plan
    assert plan["b1.drop"] == Sequence(2)
    result = auto_plan(language_model(drop=True), able=lambda name, style: not isinstance(style, Sequence))
    assert "b1.up" not in result.plan
    assert "b1.drop cannot be sharded" in result.reasons["b1.up"]


def test_layers_that_an_adapter_cannot_divide_stay_whole():
    result = auto_plan(language_model(), able=lambda name, style: not isinstance(style, Vocabulary))
    assert result.plan == both({**HEADS, **PAIR})
    assert "cannot be sharded by words" in result.reasons["head"]


def fused_model(cut):
    m = WrittenTrace()
    x = m.given(2, 5, WIDTH)
    return m.trace(m.linear("o", cut(m, m.linear("qkv", x, 3 * WIDTH)), WIDTH))


def test_parts_can_be_a_dimension():
    def first(m, qkv):  # (3, heads, features), as many vision transformers have it
        cut = m.permute(m.reshape(qkv, 2, 5, 3, 4, 4, asked=(2, 5, 3, -1, 4)), 2, 0, 3, 1, 4)
        return m.joined(m.attend(*(m.pick(cut, 0) for _ in range(3))))

    def second(m, qkv):  # (heads, 3 * features)
        cut = m.permute(m.reshape(qkv, 2, 5, 4, 12, asked=(2, 5, -1, 12)), 0, 2, 1, 3)
        return m.joined(m.attend(*m.split(cut, 4, 4, 4)))

    assert auto_plan(fused_model(first)).plan == {"qkv": Column(parts=3, units=4), "o": Row(units=4)}
    assert auto_plan(fused_model(second)).plan == {"qkv": Column(units=4), "o": Row(units=4)}


def test_numbers_that_fit_only_the_whole_model_prevent_division():
    """After dividing, a reshape to a fixed number of heads would fail, or mix heads."""

    def fixed(m, qkv):
        q, k, v = (m.reshape(part, 2, 5, 4, 4, asked=(2, 5, 4, 4)) for part in m.split(qkv, 16, 16, 16))
        return m.joined(m.attend(*(m.permute(part, 0, 2, 1, 3) for part in (q, k, v))))

    def lengths(m, qkv):
        return m.joined(m.attend(*(m.heads(part, 4) for part in m.split(qkv, 16, 16, 16, asked=(16, 16, 16)))))

    result = find_auto_plan(fused_model(fixed), 2, lambda name, style: True)
    assert not result.plan
    assert "in dimension 2: use -1" in result.reasons["qkv"]
    result = find_auto_plan(fused_model(lengths), 2, lambda name, style: True)
    assert not result.plan
    assert "pass the number of pieces" in result.reasons["o"]


def test_a_chain_is_divided_in_pairs():
    m = WrittenTrace()
    x = m.given(5, 8)
    for name in "abcde":
        x = m.pointwise(m.linear(name, x, 8), text="relu")
    plan = auto_plan(m.trace(x)).plan
    assert plan == {"a": Column(), "b": Row(), "c": Column(), "d": Row()}


def test_layers_that_break_a_rule_stay_whole():
    m = WrittenTrace()
    h = m.softmax(m.linear("up", m.given(5, 8), 16))
    result = auto_plan(m.trace(m.linear("down", h, 8)))
    assert not result.plan
    assert "needs a full dimension" in result.reasons["down"]


def test_attention_and_tables_can_stay_whole():
    m = WrittenTrace()
    ids = m.given(2, 5)
    x = m.pointwise(m.table("words", ids, 1000, WIDTH), m.table("kinds", ids, 2, WIDTH))
    x = m.attention("mixer", x, 4)
    trace = m.trace(m.linear("classes", x, 3))
    result = auto_plan(trace)
    assert result.plan == {"words": Vocabulary(), "mixer": Column()}
    assert "few" in result.reasons["kinds"]
    assert auto_plan(trace, 5).reasons["mixer"] == "4 heads for 5 ranks"


def test_a_weight_that_is_used_outside_its_layer_stays_whole():
    m = WrittenTrace()
    x = m.table("words", m.given(5), WORDS, WIDTH)
    x = m.linear("down", m.pointwise(m.linear("up", x, 64)), WIDTH)
    trace = m.trace(m.matmul(x, m.permute(m.weight("words", WORDS, WIDTH), 1, 0)))
    result = auto_plan(trace)
    assert result.plan == PAIR
    assert "used outside it" in result.reasons["words"]


def test_a_plan_prints_a_table():
    trace = language_model(fused=True)
    result = auto_plan(trace)
    lines = plan_table(result.plan, result.reasons, trace, 3).splitlines()
    assert lines[0].split() == ["layer", "style", "full", "rank", "0", "of", "3", "why"]
    (qkv,) = (line for line in lines if line.startswith("b0.qkv"))
    assert " ".join(qkv.split()) == "b0.qkv Column(parts=3, units=4) 16 x 48 16 x 24 3"
    assert reason("\n".join(lines), "b0.qkv") == reason("\n".join(lines), "b0.o") == "b0.qkv -> b0.o"
    (places,) = (line for line in lines if line.startswith("places"))
    assert "unsharded" in places
    assert "32 x 16" in places
    assert max(map(len, lines)) <= 100


def stack(*, attended=range(12)):
    """12 blocks of an attention, which is refused in some of them, and an MLP; names are long."""
    m = WrittenTrace()
    x = m.table("transformer.words", m.given(2, 5), WORDS, WIDTH)
    for number in range(12):
        heads = 4 if number in attended else 3
        name = f"transformer.some_long_name_of_a_stack.{number}.attention_and_feed_forward"
        q, k, v = m.split(m.linear(f"{name}.qkv", x, 3 * 4 * heads), *[4 * heads] * 3)
        y = m.attend(m.heads(q, heads), m.heads(k, heads), m.heads(v, heads))
        x = m.pointwise(x, m.linear(f"{name}.o", m.joined(y), WIDTH))
        x = m.pointwise(x, m.linear(f"{name}.down", m.pointwise(m.linear(f"{name}.up", x, 64)), WIDTH))
    return m.trace(m.linear("head", x, WORDS))


@pytest.mark.parametrize("refused", [(), (2, 7)])
def test_a_stack_has_a_row_for_each_layer_of_a_block_and_each_reason_once(refused):
    """Twelve blocks had 48 rows of up to 250 columns, with one reason many times."""
    trace = stack(attended=[number for number in range(12) if number not in refused])
    result = find_auto_plan(trace, 4, lambda name, style: True)
    table = plan_table(result.plan, result.reasons, trace, 4)
    rows, notes = table.split("\n\n")
    assert max(map(len, table.splitlines())) <= 100
    text = " ".join("".join(line.split("  ")[0] for line in rows.splitlines()).split())
    several = "[0-1,3-6,8-11]" if refused else "[0-11]"
    for layer in ("qkv", "o", "up", "down"):
        assert f"stack.{'[0-11]' if layer in ('up', 'down') else several}.attention_and_feed_forward.{layer}" in text
    assert len(notes.splitlines()) < 12
    notes_ = [" ".join(note.split()) for note in re.split(r"^\d+  ", notes, flags=re.MULTILINE)[1:]]
    assert len(notes_) == len(set(notes_))


def test_a_number_of_heads_is_not_the_number_of_a_layer():
    """A layer whose number equals the number of ranks would have had a row of its own."""
    layers = [f"h.{number}.attn" for number in range(10)]
    m = WrittenTrace()
    x = m.table("words", m.given(2, 5), WORDS, WIDTH)
    for name in layers:
        x = m.linear(name, x, WIDTH)
    reasons = {name: f"{name} has 4 * 1 heads for 8 ranks" for name in layers}
    lines = plan_table({}, reasons, m.trace(x), 8).splitlines()
    assert (
        len(lines) == 4
        and lines[1].startswith("h.[0-9].attn")
        and lines[3] == "1  h.[0-9].attn has 4 * 1 heads for 8 ranks"
    )


def test_angles_of_positions_have_no_gradient():
    """Values from before a pair were treated as computed from weights, unlike RoPE's angles."""
    m = WrittenTrace()
    x = m.table("words", m.given(2, 5), WORDS, WIDTH)
    angles = m.pointwise(m.constant(1, 1, 5, 4), text="cos")
    q, k, v = (m.heads(m.linear(name, x, WIDTH), 4) for name in "qkv")
    y = m.attend(m.pointwise(q, angles), m.pointwise(k, angles), v)
    head = m.linear("head", m.linear("o", m.joined(y), WIDTH), WORDS)
    assert auto_plan(m.trace(head)).plan == {**ENDS, **HEADS}


def test_only_the_layer_that_breaks_a_rule_is_left_out():
    """A weight shared by two modules, one of them divided, discarded the whole plan."""
    result = auto_plan(replace(language_model(), tied=(("places", "b0.up"),)))
    expected: Plan = {**ENDS, **both({**HEADS, **PAIR})}
    assert result.plan == {name: style for name, style in expected.items() if name not in ("b0.up", "b0.down")}
    assert "tied weights need one style" in result.reasons["b0.down"]


def test_tables_and_logits_may_share_a_weight():
    """Encoder and decoder have the words of one table, which is called by neither."""
    m = WrittenTrace()
    table = m.table("encoder.words", m.given(2, 5), WORDS, WIDTH)
    shifted = m.pointwise(m.given(2, 5), text="masked_fill")
    y = m.pointwise(table, m.table("decoder.words", shifted, WORDS, WIDTH))
    trace = m.trace(m.linear("head", y, WORDS), tied=[("shared", "encoder.words", "decoder.words", "head")])
    table_only = auto_plan(trace, able=lambda name, style: name == "head" or not getattr(style, "gather", False)).plan
    words = ("shared", "encoder.words", "decoder.words")
    assert table_only == {**dict.fromkeys(words, Vocabulary()), "head": Vocabulary(gather=True)}


def numbered(values, asked):
    """Return the trace of a fused attention that uses its own numbers for the lengths of pieces and for heads."""
    used = NumberUses()
    own = {name: Length.of(value, ("attn", name), used) for name, value in values.items()}
    lengths, heads = asked(own)
    m = WrittenTrace()
    x = m.table("words", m.given(2, 5), WORDS, WIDTH)
    pieces = m.split(m.linear("qkv", x, 3 * WIDTH), 16, 16, 16, asked=lengths)
    q, k, v = (m.permute(m.reshape(one, 2, 5, 4, 4, asked=(2, 5, *heads)), 0, 2, 1, 3) for one in pieces)
    head = m.linear("head", m.linear("out", m.joined(m.attend(q, k, v)), WIDTH), WORDS)
    return replace(m.trace(head), numbers={f"attn.{name}": value for name, value in values.items()}, used=used)


def test_numbers_of_a_module_become_those_of_a_rank():
    """GPT-2 splits by a size, Falcon reshapes to heads: both numbers are those of the whole model."""
    trace = numbered({"size": 16, "heads": 4}, lambda own: ((own["size"],), (own["heads"], 4)))
    fused: Plan = {"qkv": Column(3, units=4), "out": Row(units=4)}
    assert auto_plan(trace).plan == {**ENDS, **fused, "attn.size": PerRank(4), "attn.heads": PerRank(4)}
    table = plan_table(auto_plan(trace).plan, auto_plan(trace).reasons, trace, 2)
    (row,) = [line.split(maxsplit=4) for line in table.splitlines() if line.startswith("attn.size")]
    assert row[:4] == ["attn.size", "PerRank(units=4)", "16", "8"] and reason(table, "attn.size") == "qkv -> out"


def test_numbers_change_only_where_all_shapes_stay_right():
    """Of two factors of a product, the one without a use in a whole dimension changes."""
    trace = numbered({"heads": 4, "width": 4}, lambda own: ((own["heads"] * own["width"],), (-1, own["width"])))
    assert {name for name in auto_plan(trace).plan if name.startswith("attn")} == {"attn.heads"}


@pytest.mark.parametrize("use", [lambda n: n**-0.5, float])
def test_a_number_that_is_more_than_a_length_stays(use):
    def asked(own):
        use(own["size"])
        return (own["size"],), (-1, 4)

    result = auto_plan(numbered({"size": 16}, asked))
    assert result.plan == ENDS and "pass the number of pieces" in result.reasons["qkv"]


def test_a_length_of_a_divided_dimension_is_not_a_number():
    """A model scaled by h.shape[-1] ** -0.5, and a rank has fewer of them."""
    m = WrittenTrace()
    h = m.linear("up", m.table("words", m.given(2, 5), WORDS, WIDTH), 64)
    head = m.linear("head", m.linear("down", m.pointwise(h, text="mul"), WIDTH), WORDS)
    assert "up" in auto_plan(m.trace(head)).plan
    result = auto_plan(replace(m.trace(head), used={(h, 2): "model.py:3"}))
    assert result.plan == ENDS and "model.py:3: the length of a tensor that is sharded" in result.reasons["up"]


def test_a_bias_for_each_head_is_divided_with_them():
    """T5 looks up a bias for each head in its first block, and uses it in all; without a table it makes zeros."""
    used = NumberUses()
    m = WrittenTrace()
    x = m.table("words", m.given(2, 5), WORDS, WIDTH)
    biases = m.permute(m.table("biases", m.constant(5, 5), 32, 4), 2, 0, 1)
    for at in range(2):
        q, k, v = (m.heads(m.linear(f"b{at}.{name}", x, WIDTH), 4) for name in "qkv")
        zeros = m.step("", "constant", (), [(4, 5, 5)], requested=(Length.of(4, ("attn", "heads"), used), 5, 5))[0]
        scores = m.pointwise(m.matmul(q, m.permute(k, 0, 1, 3, 2)), biases if at == 0 else m.pointwise(biases, zeros))
        x = m.pointwise(x, m.linear(f"b{at}.o", m.joined(m.matmul(m.softmax(scores), v)), WIDTH))
    trace = replace(m.trace(m.linear("head", x, WORDS)), numbers={"attn.heads": 4})
    expected: Plan = {**ENDS, **both(HEADS), "biases": Column(units=4), "attn.heads": PerRank(4)}
    assert auto_plan(trace).plan == expected


def test_one_head_of_keys_may_have_no_dimension_of_heads():
    """Queries of all heads are multiplied with keys as wide as one head."""
    m = WrittenTrace()
    x = m.table("words", m.given(2, 5), WORDS, WIDTH)
    q, k, v = m.heads(m.linear("q", x, WIDTH), 4), m.linear("k", x, 4), m.linear("v", x, 4)
    k, v = m.reshape(k, 2, 1, 5, 4), m.reshape(v, 2, 1, 5, 4)
    weights = m.softmax(m.matmul(q, m.permute(k, 0, 1, 3, 2)))
    head = m.linear("head", m.linear("o", m.joined(m.matmul(weights, v)), WIDTH), WORDS)
    shared = dict.fromkeys("kv", Replicate(into_sharded=True))
    assert auto_plan(m.trace(head)).plan == {**ENDS, **HEADS, **shared}


@pytest.mark.parametrize(("keys", "size"), [(2, 4), (1, 2)])
def test_heads_of_keys_may_be_fewer_than_ranks(keys, size):
    """Ranks share heads of keys, and repeat them for their own queries, as often as the model specifies."""
    used = NumberUses()
    groups = 8 // keys
    m = WrittenTrace()
    x = m.table("words", m.given(2, 5), WORDS, WIDTH)
    q, k, v = (m.heads(m.linear(name, x, 2 * count), count) for name, count in (("q", 8), ("k", keys), ("v", keys)))
    repeated = []
    for one in (k, v):
        new = m.step("", "equation", [one], [(2, keys, 1, 5, 2)], equation=selection(4, (0, 1, -1, 2, 3)))[0]
        asked = (2, -1, Length.of(groups, ("attn", "groups"), used), 5, 2)
        shape = (2, keys, groups, 5, 2)
        equation = Equation(pointwise((2, keys, 1, 5, 2), shape).inputs[:1], tuple(range(5)))
        many = m.step("", "equation", [new], [shape], equation=equation, requested=asked)[0]
        repeated.append(m.reshape(many, 2, 8, 5, 2))
    scores = m.matmul(q, m.permute(repeated[0], 0, 1, 3, 2))
    head = m.linear("head", m.linear("o", m.joined(m.matmul(m.softmax(scores), repeated[1])), WIDTH), WORDS)
    trace = replace(m.trace(head), numbers={"attn.groups": groups})
    expected: Plan = {**ENDS, "q": Column(units=8), "o": Row(units=8)}
    if keys > 1:
        expected = {**expected, **dict.fromkeys("kv", Column(units=2)), "attn.groups": PerRank(among=2)}
    else:
        shared = dict.fromkeys("kv", Replicate(into_sharded=True))
        expected = {**expected, **shared, "attn.groups": PerRank(8)}
    result = find_auto_plan(trace, size, lambda name, style: True)
    assert result.plan == expected, result.reasons
    assert PerRank(among=2).own(4, 3, 4) == PerRank(8).own(8, 1, 2) // 2 == 2


@pytest.mark.parametrize("kind", ["unknown", "number"])
def test_an_unknown_operation_leaves_a_pair_whole(kind):
    """Others stay divided, and the table names the operation and its place."""
    m = WrittenTrace()
    x, strange = m.table("words", m.given(2, 5), WORDS, WIDTH), {"text": "median in a", "place": "model.py:7"}
    for name in ("a", "b"):
        h = m.linear(f"{name}.up", x, 64)
        if name == "a":
            output = m.step("", kind, [h], [(2, 5, 64)] if kind == "unknown" else [], **strange)
            h = output[0] if output else h
        x = m.linear(f"{name}.down", m.pointwise(h), WIDTH)
    result = auto_plan(m.trace(m.linear("head", x, WORDS)))
    assert result.plan == {**ENDS, "b.up": Column(), "b.down": Row()}
    assert {result.reasons[f"a.{name}"] for name in ("up", "down")} == {result.reasons["a.up"]}
    assert result.reasons["a.up"].startswith("median in a, model.py:7: ")


def test_an_explicit_norm_of_each_head_sums_its_gradient():
    """Qwen3 has one, whose weight is whole, and each rank would have a part of its gradient."""
    m = WrittenTrace()
    x = m.table("words", m.given(2, 5), WORDS, WIDTH)
    q, k, v = (m.heads(m.linear(name, x, WIDTH), 4) for name in "qkv")
    y = m.attend(m.pointwise(q, m.weight("norm", 4), text="mul"), k, v)
    head = m.linear("head", m.linear("o", m.joined(y), WIDTH), WORDS)
    assert auto_plan(m.trace(head)).plan == {**ENDS, **HEADS, "norm": Sequence(1)}
    assert auto_plan(m.trace(head), able=lambda name, style: name != "norm").plan == ENDS


def tuned(order):
    """An MLP and heads whose layers have additional products of two small ones, as in LoRA."""

    def layer(m, x, name, features, rank=2):
        def factors():
            return m.linear(f"{name}.b", m.linear(f"{name}.a", m.pointwise(x, text="dropout"), rank), features)

        added = factors() if order == "factors first" else None
        base = m.linear(f"{name}.base", x, features)
        return m.pointwise(base, m.pointwise(factors() if added is None else added, text="mul"))

    m = WrittenTrace()
    x = m.given(2, 5, WIDTH)
    q, k, v = (layer(m, x, name, WIDTH) if name != "k" else m.linear(name, x, WIDTH) for name in "qkv")
    y = layer(m, m.joined(m.attend(*(m.heads(one, 4) for one in (q, k, v)))), "o", WIDTH)
    return m.trace(layer(m, m.pointwise(layer(m, y, "up", 64), text="gelu"), "down", WIDTH))


@pytest.mark.parametrize("order", ["base first", "factors first"])
def test_low_rank_factors_follow_their_layers(order):
    """Factors of LoRA were divided by its rank, bases not at all, and merging added a part's product to the whole."""
    result = auto_plan(tuned(order))
    heads = dict.fromkeys(["q.base", "q.b", "k", "v.base", "v.b"], Column(units=4))
    rows: Plan = {"o.base": Row(units=4), "o.a": Row(units=4), "down.base": Row(), "down.a": Row()}
    assert result.plan == {**heads, **rows, "up.base": Column(), "up.b": Column()}
    assert result.reasons["q.a"] == "of rank 2, added to q.base"
    whole = auto_plan(tuned(order), able=lambda name, style: not name.endswith("base"))
    assert whole.plan == {}


def test_a_table_of_positions_is_not_divided_as_words():
    """A table of positions was divided as words if the output had as many features as the table has rows."""
    m = WrittenTrace()
    x = m.pointwise(m.table("words", m.given(2, 5), WORDS, WIDTH), m.table("places", m.constant(5), 12, WIDTH))
    assert auto_plan(m.trace(m.linear("projection", x, 12))).plan == {"words": Vocabulary()}
