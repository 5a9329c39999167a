"""Codecs by name: "int8", "int4:rounding=stochastic", "topk:ratio=0.01"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

from commlib.compress.cast import Cast, Float8
from commlib.compress.codec import Codec
from commlib.compress.quantise import QSGD, Blocks
from commlib.compress.sign import Sign
from commlib.compress.sparse import RandomK, TopK
from commlib.errors import UsageError

CODECS: Mapping[str, Callable[..., Codec]] = {
    "fp16": partial(Cast, "float16"),
    "bf16": partial(Cast, "bfloat16"),
    "fp8": Float8,
    "fp8_e4m3": partial(Float8, "e4m3"),
    "fp8_e5m2": partial(Float8, "e5m2"),
    "int8": partial(Blocks, 8),
    "int4": partial(Blocks, 4),
    "qsgd": QSGD,
    "sign": Sign,
    "topk": TopK,
    "randomk": RandomK,
}
"""What turns arrays into bytes: for reductions, pipeline edges and exchanges alike."""


def codec_of(given: str | Codec) -> Codec:
    """Return the codec of a name, or the codec that was given. Raises UsageError."""
    if not isinstance(given, str):
        if isinstance(given, Codec):
            return given
        raise UsageError(f"expected a codec or its name, got {given!r}; names are {', '.join(CODECS)}")
    name, options = parse(given)
    if name not in CODECS:
        raise UsageError(f"unknown codec {name!r}; known are {', '.join(CODECS)}")
    return make(CODECS[name], given, options)  # type: ignore[no-any-return]


def parse(text: str) -> tuple[str, dict[str, str]]:
    """Return a name, and the options after its colon. Raises UsageError."""
    name, _, rest = text.partition(":")
    options = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise UsageError(f"compression {text!r}: expected option=value after the colon, got {item!r}")
        options[key.strip()] = value.strip()
    return name.strip(), options


def make(maker: Callable[..., Any], text: str, options: Mapping[str, str]) -> Any:
    """Return what `maker` makes of options as they were written. Raises UsageError."""
    kind: Any = maker.func if isinstance(maker, partial) else maker
    assert is_dataclass(kind)
    taken = len(maker.args) if isinstance(maker, partial) else 0
    known = {field.name: field for field in fields(kind)[taken:] if field.init}
    values = {}
    for key, value in options.items():
        if key not in known:
            raise UsageError(f"compression {text!r}: unknown option {key!r}; known are {', '.join(known) or 'none'}")
        values[key] = _read(value, str(known[key].type), f"compression {text!r}: {key}")
    return maker(**values)


_WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def _read(text: str, kind: str, what: str) -> Any:
    """Return the value of an option whose annotation is `kind`."""
    kinds = {word.strip() for word in kind.split("|")}
    if "None" in kinds and text.lower() == "none":
        return None
    try:
        if "bool" in kinds:
            return _WORDS[text.lower()]
        if "int" in kinds:
            return int(text)
        if "float" in kinds:
            return float(text)
        if kind.startswith("tuple"):
            return tuple(float(part) for part in text.split("/") if part)
    except (KeyError, ValueError):
        raise UsageError(f"{what}={text!r}: expected {kind}") from None
    return text
