"""Codecs and schemes by name."""

from __future__ import annotations

import pytest

from commlib.compress.codecs.quantise import Blocks
from commlib.compress.codecs.sparse import TopK
from commlib.compress.registry import CODECS, SCHEMES, codec_of, scheme_of
from commlib.compress.scheme import Scheme
from commlib.compress.schemes.all_gather import AllGather
from commlib.compress.schemes.all_to_all import AllToAll
from commlib.compress.schemes.dgc import DGC
from commlib.compress.schemes.power_sgd import PowerSGD
from commlib.errors import UsageError


@pytest.mark.parametrize("name", [*CODECS, *SCHEMES])
def test_every_name_gives_a_scheme(name):
    scheme = scheme_of(name)
    assert isinstance(scheme, Scheme)
    assert scheme.name
    assert scheme == scheme_of(name)


@pytest.mark.parametrize("name", list(CODECS))
def test_a_codec_name_gives_an_equal_codec(name):
    codec = codec_of(name)
    assert codec_of(codec.name) == codec
    assert codec_of(codec) is codec


def test_options_follow_a_colon():
    assert codec_of("int4:block=64,rounding=stochastic") == Blocks(4, block=64, rounding="stochastic")
    assert codec_of(Blocks(4, block=64, rounding="stochastic").name) == Blocks(4, block=64, rounding="stochastic")
    assert scheme_of("powersgd:rank=2,warm_start=false") == PowerSGD(rank=2, warm_start=False)
    assert scheme_of("topk:ratio=0.05") == AllGather(TopK(0.05))
    assert scheme_of(Blocks(8)) == AllToAll(Blocks(8))
    assert scheme_of("none") is None


@pytest.mark.parametrize(
    "scheme",
    [
        AllToAll(Blocks(8), feedback=False),
        AllToAll(Blocks(4, rounding="stochastic")),
        AllGather(TopK(0.05), feedback=False, dense_below=0),
        DGC(0.01, momentum=0.8, warmup=()),
        PowerSGD(rank=1, feedback=False),
    ],
    ids=lambda scheme: scheme.name,
)
def test_a_scheme_name_gives_an_equal_scheme(scheme):
    assert scheme_of(scheme.name) == scheme


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int7", "unknown compression 'int7'; known are none, fp16, bf16"),
        ("int8:size=3", "unknown option 'size'; known are block"),
        ("int8:block=many", "block='many': expected int"),
        ("int8:block", "expected option=value after the colon, got 'block'"),
        (8, "must be a name, a codec or a scheme, got 8"),
    ],
)
def test_mistakes_are_named(text, message):
    with pytest.raises(UsageError, match=message):
        scheme_of(text)


def test_schemes_for_gradients_are_not_codecs():
    with pytest.raises(UsageError, match="unknown codec 'powersgd'"):
        codec_of("powersgd")
