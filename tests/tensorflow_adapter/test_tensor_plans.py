"""Plans of Keras models: invalid ones are refused, valid ones accepted, and verify names the layer that differs."""

from __future__ import annotations

import io
import warnings
from typing import Any, cast

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import commlib
from commlib.errors import UsageError
from commlib.tensor_parallel import Column, Plan, Row, Sequence
from commlib_tensorflow.tensor import gather, parallelize, scatter, verify
from tests.tensorflow_adapter.tensor_oracle import alone

WORDS, WIDTH, HEADS, TOKENS = 37, 24, 6, 5


@pytest.fixture(autouse=True)
def float64():
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(before[0])
    keras.config.set_dtype_policy(before[1])


@pytest.fixture
def tp(comm):
    return commlib.Mesh(tp=comm.size)["tp"]


class Attention(layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Heads, split in the ways that models use."""

    def __init__(self, way: str, **options: Any) -> None:
        super().__init__(**options)
        self.size, self.way = WIDTH // HEADS, way
        names = "abc" if way == "plain" else ["abc"]
        self.firsts = [layers.Dense(WIDTH * (1 if way == "plain" else 3), name=name) for name in names]
        self.last = layers.Dense(WIDTH, name="d")

    def build(self, shape: Any) -> None:
        for layer in (*self.firsts, self.last):
            layer.build(shape)

    def call(self, x: Any) -> Any:
        rows, tokens = ops.shape(x)[0], ops.shape(x)[1]
        if self.way == "parts":
            cut = ops.reshape(self.firsts[0](x), (rows, tokens, 3, -1, self.size))
            q, k, v = tf.unstack(tf.transpose(cut, (2, 0, 3, 1, 4)))
        else:
            each = [first(x) for first in self.firsts] if self.way == "plain" else ops.split(self.firsts[0](x), 3, -1)
            shape = (rows, tokens, -1, self.size)
            q, k, v = (ops.transpose(ops.reshape(part, shape), (0, 2, 1, 3)) for part in each)
        if self.way == "parts":
            scores = ops.einsum("bhqd,bhkd->bhqk", q, k) * self.size**-0.5
        else:
            scores = tf.matmul(q, k, transpose_b=True) * self.size**-0.5
        mask = tf.linalg.band_part(tf.ones((tokens, tokens), tf.bool), -1, 0)
        y = ops.matmul(ops.softmax(tf.where(mask, scores, -1e9)), v)
        return self.last(ops.reshape(ops.transpose(y, (0, 2, 1, 3)), (rows, tokens, -1)))


def block(x, name, way="plain", gated=False):
    x = x + Attention(way, name=f"{name}_g")(layers.LayerNormalization(name=f"{name}_e")(x))
    y = layers.RMSNormalization(name=f"{name}_f")(x)
    h = layers.Dense(41, "gelu", name=f"{name}_h")(y)
    if gated:
        h = layers.Multiply()([h, layers.Dense(41, name=f"{name}_j")(y)])
    return layers.Add()([x, layers.Dense(WIDTH, name=f"{name}_i")(h)])


def language_model(**options):
    keras.utils.set_random_seed(3)
    ids = keras.Input((TOKENS,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH, name="k")(ids)
    x = block(x, "m0", **options)
    return keras.Model(ids, layers.Dense(WORDS, name="o")(layers.LayerNormalization(name="n")(x)))


def one_block(**options):
    keras.utils.set_random_seed(3)
    x = keras.Input((TOKENS, WIDTH))
    return keras.Model(x, block(x, "m", **options))


class Subclassed(keras.Model):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.g = Attention("plain", name="g")
        self.h, self.i = layers.Dense(41, name="h"), layers.Dense(WIDTH, name="i")

    def call(self, x: Any) -> Any:
        x = x + self.g(x)
        return x + self.i(tf.nn.relu(self.h(x)))


def subclassed():
    keras.utils.set_random_seed(3)
    model = Subclassed()
    model(rows())
    return model


def words():
    return np.random.default_rng(1).integers(0, WORDS, (2, TOKENS)).astype("int32")


def rows():
    return np.random.default_rng(1).standard_normal((2, TOKENS, WIDTH))


def same_training(tp, plain, divided, x, y):
    """Train both in fit, and check that losses are equal."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True) if x.dtype == np.int32 else "mse"

    def trained(model):
        model.compile(keras.optimizers.SGD(1e-2), loss, jit_compile=False)
        return model.fit(x, y, epochs=2, batch_size=1, shuffle=False, verbose=0).history["loss"]

    expected = alone(tp, lambda: trained(plain))
    assert trained(divided) == pytest.approx(expected, rel=1e-10)


PAIR: Plan = {"*h": Column(), "*i": Row()}
PLAN: Plan = {**{f"*/{name}": Column(units=HEADS) for name in "abc"}, "*/d": Row(units=HEADS), **PAIR}
OF_BLOCK: Plan = {**{f"m_g/{name}": Column(units=HEADS) for name in "abc"}, "m_g/d": Row(units=HEADS)}
OF_BLOCK = {**OF_BLOCK, "m_h": Column(), "m_i": Row()}


@pytest.mark.ranks(max=3)
class TestPlans:
    @pytest.mark.parametrize("options", [{"way": "chunk"}, {"gated": True}, {"way": "parts"}])
    def test_auto(self, tp, options):
        model, plain, text = language_model(**options), language_model(**options), list[str]()
        divided = parallelize(model, tp, "auto", verify=words(), report=text.append)
        assert len(text) == (tp.rank == 0)
        fused = "way" in options
        for first in ["abc"] if fused else ["a", "b", "c"]:
            assert divided_style(divided, f"m0_g/{first}") == Column(3 if fused else 1, HEADS)
        assert divided_style(divided, "m0_g/d") == Row(units=HEADS)
        assert divided_style(divided, "m0_h") == Column()
        assert divided_style(divided, "m0_i") == Row()
        same_training(tp, plain, divided, words(), words())

    def test_auto_leaves_out_indivisible_layers(self, tp):
        """The rules ignore a constraint, but it would see only a part."""
        reports: list[str] = []
        x = y = keras.Input([WIDTH])
        for name, constraint in (("kept", keras.constraints.UnitNorm(axis=1)), ("m", None)):
            y = keras.layers.Dense(12, "relu", kernel_constraint=constraint, name=f"{name}_h")(y)
            y = keras.layers.Dense(WIDTH, name=f"{name}_i")(y)
        with pytest.raises(UsageError, match="report must be a function of a text, such as print, got 3"):
            parallelize(keras.Model(x, y), tp, "auto", report=cast("Any", 3))
        divided = parallelize(keras.Model(x, y), tp, "auto", report=reports.append)
        assert [layer.name for layer in divided.layers if hasattr(layer, "style")] == ["m_h", "m_i"]
        assert tp.rank or "kept_h cannot be sharded as Column()" in " ".join(reports[0].split())

    def test_auto_of_a_subclassed_model(self, tp):
        model, plain = subclassed(), subclassed()
        with pytest.raises(UsageError, match="pass a batch as example= or verify="):
            parallelize(model, tp, "auto")
        divided = parallelize(model, tp, "auto", example=rows(), report=lambda table: None)
        assert divided.h.style == Column()
        assert divided.g.last.style == Row(units=HEADS)
        same_training(tp, plain, divided, rows(), rows())

    @pytest.mark.parametrize(
        ("kind", "way"),
        [
            (one_block, "verify"),
            (one_block, "example"),
            (subclassed, "first call"),
            (one_block, "first call"),
            (subclassed, "verify"),
            (subclassed, "example"),
        ],
    )
    def test_valid_plans(self, tp, way, kind):
        model, plain = kind(), kind()
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            divided = parallelize(model, tp, PLAN, **({} if way == "first call" else {way: rows()}))
            same_training(tp, plain, divided, rows(), rows())

    @pytest.mark.parametrize(
        ("left_out", "text"),
        [
            ("m_g/d", r"m_g/d \(Dense\).*takes all features"),
            ("m_g/a", r"sharded values combine only with values sharded the same way"),
            ("m_i", r"m_i \(Dense\).*takes all features"),
            ("m_h", r"m_i \(Dense\).*a Row takes an input that a Column has sharded.*split=True"),
        ],
    )
    def test_what_is_left_out(self, tp, left_out, text):
        """A functional model needs no example."""
        plan = {name: style for name, style in OF_BLOCK.items() if name != left_out}
        model = one_block()
        for options in ({}, {"example": rows()}):
            with pytest.raises(UsageError, match=text):
                parallelize(model, tp, plan, **options)
        assert not any(hasattr(layer, "style") for layer in model.layers)

    @pytest.mark.parametrize("call", ["call", "fit"])
    def test_the_first_call_of_a_subclassed_model_is_refused(self, tp, call):
        model = parallelize(subclassed(), tp, {"*h": Column()})
        model.compile("sgd", "mse", jit_compile=False)
        with pytest.raises(UsageError, match=r"i \(Dense\).*takes all features"):
            model(rows()) if call == "call" else model.fit(rows(), rows(), verbose=0)

    def test_invalid_plans(self, tp):
        for way, text in (("chunk", r"Split in m_g.*Column\(parts=3\)"), ("parts", "fused features|parts")):
            with pytest.raises(UsageError, match=text):
                parallelize(one_block(way=way), tp, {"m_g/abc": Column(units=HEADS), "m_g/d": Row(units=HEADS)})
        between = {
            "needs a full dimension": layers.LayerNormalization(),
            "different random numbers on each rank": layers.Dropout(0.1),
            r"values for each feature are sharded like the features.*give it Sequence\(1\)": layers.PReLU(),
        }
        for text, layer in between.items():
            model = keras.Sequential(
                [keras.Input((8,)), layers.Dense(12, name="up"), layer, layers.Dense(8, name="dn")]
            )
            with pytest.raises(UsageError, match=text):
                parallelize(model, tp, {"*up": Column(), "*dn": Row()})

    def test_an_output_may_stay_divided_if_declared(self, tp):
        def model():
            return keras.Sequential([keras.Input((8,)), layers.Dense(12, "relu", name="up")])

        x = np.random.default_rng(0).standard_normal((3, 8))
        with pytest.raises(UsageError, match="a model returns unsharded values"):
            parallelize(model(), tp, {"*up": Column()})
        out = parallelize(model(), tp, {"*up": Column()}, verify=x, divided_output=True)(x)
        assert out.shape[1] <= 12

    def test_a_models_own_moves_are_not_judged(self, tp):
        """This also holds on one rank, where they move nothing."""

        class Moves(keras.Model):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.up, self.down = layers.Dense(7, name="up"), layers.Dense(WIDTH, name="down")

            def call(self, x: Any) -> Any:
                x = self.up(x * 2)
                x = self.down(scatter(x, tp, -1) if hasattr(self.down, "style") else x)
                return gather(scatter(x, tp, 1), tp, 1)

        model = Moves()
        model(rows())
        parallelize(model, tp, {"*down": Row()})
        assert model(rows()).shape == rows().shape

    @pytest.mark.ranks(min=2, max=3)
    def test_a_fixed_number_of_heads_is_detected(self, tp):
        class Mixing(layers.Layer):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = layers.Dense(WIDTH, name="a"), layers.Dense(WIDTH, name="b")

            def build(self, shape: Any) -> None:
                self.a.build(shape)
                self.b.build(shape)

            def call(self, x: Any) -> Any:
                heads = tf.transpose(tf.reshape(self.a(x), (2, TOKENS, HEADS, -1)), (0, 2, 1, 3))
                y = tf.matmul(tf.nn.softmax(tf.matmul(heads, heads, transpose_b=True)), heads)
                return self.b(tf.reshape(tf.transpose(y, (0, 2, 1, 3)), (2, TOKENS, -1)))

        x = keras.Input((TOKENS, WIDTH), batch_size=2)
        model = keras.Model(x, Mixing()(x))
        with pytest.raises(UsageError, match=r"use -1|the sharded model fails"):
            parallelize(model, tp, {"*/a": Column(), "*/b": Row()})


def divided_style(model, name):
    layer = model
    for part in name.split("/"):
        inner = layer.layers if isinstance(layer, keras.Model) else [*layer.firsts, layer.last]
        layer = next(one for one in inner if one.name == part)
    return layer.style


@pytest.mark.ranks(max=3)
class TestVerify:
    @pytest.mark.ranks(min=2, max=3)
    @pytest.mark.parametrize("name", ["m_g/b", "m_i", "m_e"])
    def test_a_layer_that_differs_is_named(self, tp, name):
        model, plain = one_block(), one_block()
        divided = parallelize(model, tp, OF_BLOCK)
        verify(divided, plain, tp, rows())
        if tp.rank == 1:
            layer = divided.get_layer(name.partition("/")[0])
            weight = (layer.firsts[1] if "/" in name else layer).trainable_variables[0]
            changed = weight.numpy()
            changed.reshape(-1)[0] += 1e-3
            weight.assign(changed)
        with pytest.raises(UsageError) as caught:
            verify(divided, plain, tp, rows())
        text = str(caught.value)
        assert f"verify: {name} (" in text, text
        ranks = "on ranks" if name == "m_i" else "on rank 1 of"
        assert ranks in text, text
        verify(divided, plain, tp, rows(), tolerance=1.0)

    def test_a_wrong_gradient_is_named(self, tp):
        @tf.custom_gradient
        def halved(x: Any) -> Any:
            return tf.identity(x), lambda gradient: gradient / 2

        class Lossy(keras.Model):  # type: ignore[misc]
            loses = False

            def __init__(self) -> None:
                super().__init__()
                self.up, self.down = layers.Dense(9, name="up"), layers.Dense(5, name="down")

            def call(self, x: Any) -> Any:
                y = self.up(x)
                return self.down(halved(y) if self.loses else y)

        x, models = rows()[0], []
        for _ in range(2):
            keras.utils.set_random_seed(3)
            models.append(Lossy())
            models[-1](x)
        plain, divided = models
        parallelize(divided, tp, {"*up": Column(), "*down": Row()}, verify=x)
        divided.loses = True
        with pytest.raises(UsageError, match=r"the gradient of input 0 differs.* 0\.5 of its largest"):
            verify(divided, plain, tp, x)

    def test_several_inputs_and_dtypes(self, tp):
        for dtype in ("float32", "bfloat16", "mixed_bfloat16"):
            first, second = (keras.Input((7,), name=name) for name in ("first", "second"))
            y = layers.Dense(9, name="up", dtype=dtype)(layers.Concatenate()([first, second]))
            model = keras.Model({"first": first, "second": second}, layers.Dense(5, name="down", dtype=dtype)(y))
            x = rows()[0, :, :7]
            parallelize(model, tp, {"up": Column(), "down": Row()}, verify={"first": x, "second": x[::-1]})

    def test_it_leaves_no_trace(self, tp):
        model = keras.Sequential(
            [keras.Input((7,)), layers.Dense(9, name="up"), layers.Dense(5, name="dn"), layers.BatchNormalization(),
             layers.Dropout(0.5, name="drop")]
        )  # fmt: skip
        seeds = [variable.numpy() for variable in model.non_trainable_variables]
        parallelize(model, tp, {"*up": Column(), "*dn": Row()}, verify=rows()[0, :, :7])
        assert all(map(np.array_equal, seeds, [variable.numpy() for variable in model.non_trainable_variables]))
        assert not model.losses
        assert keras.layers.Layer.__call__.__module__.startswith("keras")


@pytest.mark.ranks(max=2)
def test_first_calls_are_checked_once(tp):
    """The check runs the model three more times: divided, whole, and divided next to the whole.

    Output of the process reveals the runs, but no list that the model appends to.
    """
    calls, printed = [], io.StringIO()

    class Counted(Subclassed):
        def call(self, x: Any) -> Any:
            calls.append(1)
            printed.write("x")
            return super().call(x)

    model = Counted()
    model(rows())
    parallelize(model, tp, PLAN)
    calls.clear()
    before = len(printed.getvalue())
    for _ in range(3):
        model(rows())
    assert len(calls) == 3
    assert len(printed.getvalue()) - before == (6 if tp.size > 1 else 4)
    for _ in range(2):  # training may differ
        model(rows(), training=True)
    assert len(calls) == 5
    assert len(printed.getvalue()) - before == (11 if tp.size > 1 else 7)
    assert "call" not in vars(model)


@pytest.mark.any_ranks
class TestAllOrNothing:
    """Regression: a plan that failed at one of its layers left earlier layers divided."""

    def refused(self, comm, model, plan, text, **options):
        """The model stays unchanged, also if ranks have different values or only one rank detects an error."""
        kinds, before = [type(layer) for layer in model.layers], model.get_weights()
        with pytest.raises(UsageError, match=text):
            parallelize(model, comm, plan, **options)
        assert [type(layer) for layer in model.layers] == kinds
        assert not any(hasattr(layer, "style") for layer in model.layers)
        assert all(map(np.array_equal, model.get_weights(), before))

    def test_layers_that_cannot_be_divided(self, comm):
        def model(*last, width=6):
            given = [keras.Input((width,)), layers.Dense(width, name="a")]
            return keras.Sequential([*given, *last])

        last = comm.rank == comm.size - 1
        wrong = {
            "split among": (layers.Dense(4, name="b"), Row(units=1)) if comm.size > 1 else None,
            "add up to 5": (layers.Dense(4, name="b"), Column(parts=(2, 3))),
            "has a constraint": (layers.Dense(4, kernel_constraint="unit_norm" if last else None, name="b"), Row())
            if comm.size > 1
            else None,
            "needs all outputs": (layers.Dense(4, activation="softmax", name="b"), Column()),
            "would see only a shard": (layers.LayerNormalization(name="b"), Sequence(-1)),
            "depends on several positions": (layers.Reshape((3, 2), name="b"), Sequence()),
        }
        for text, case in wrong.items():
            if case is not None:
                self.refused(comm, model(case[0]), {"a": Column(), "b": case[1]}, text)

        class Tied(layers.Dense):  # type: ignore[misc]
            def build(self, shape: Any) -> None:
                super().build(shape)
                self._kernel = first.kernel

        first, second = layers.Dense(6, name="a"), Tied(6, name="b")
        tied = keras.Sequential([keras.Input((6,)), first, second])
        second.__class__ = layers.Dense
        self.refused(comm, tied, {"a": Column(), "b": Row()}, "tied weights need one style")
        convolutions = keras.Sequential(
            [keras.Input((5, 4)), layers.Conv1D(4, 1, name="a"), layers.Conv1D(4, 1, groups=2, name="b")]
        )
        self.refused(comm, convolutions, {"a": Column(), "b": Row()}, "groups=2")

    def test_ranks_with_different_values(self, comm):
        keras.utils.set_random_seed(comm.rank)
        model = keras.Sequential([keras.Input((4,)), layers.Dense(6, name="a"), layers.Dense(4, name="b")])
        self.refused(comm, model, {"a": Column()}, "takes all features")

    def test_a_model_that_fails_on_one_rank(self, comm):
        class Fails(keras.Model):  # type: ignore[misc]
            fails = False

            def __init__(self) -> None:
                super().__init__()
                self.up, self.down = layers.Dense(6, name="up"), layers.Dense(4, name="down")

            def call(self, x: Any) -> Any:
                if self.fails:
                    raise KeyError("x")
                return self.down(self.up(x))

        model, x = Fails(), rows()[0, :, :4]
        model(x)
        model.fails = comm.rank == comm.size - 1
        for plan in ({"*up": Column(), "*down": Row()}, "auto"):
            with pytest.raises(KeyError if model.fails else UsageError):
                parallelize(model, comm, plan, example=x)
        assert type(model.up) is layers.Dense
