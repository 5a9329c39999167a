"""Registry: find codecs and schemes by name, and parse the options after the colon.

"int8", "int4:rounding=stochastic", "topk:ratio=0.01", "powersgd:rank=4".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

from commlib.arguments import suggest
from commlib.compress.auto import AUTO_OF, Auto
from commlib.compress.codec import Codec
from commlib.compress.codecs.cast import Cast, Float8
from commlib.compress.codecs.quantise import QSGD, Blocks
from commlib.compress.codecs.sign import Sign
from commlib.compress.codecs.sparse import RandomK, TopK
from commlib.compress.scheme import Scheme
from commlib.compress.schemes.all_gather import AllGather
from commlib.compress.schemes.all_to_all import AllToAll
from commlib.compress.schemes.dgc import DGC
from commlib.compress.schemes.power_sgd import PowerSGD
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
"""Codecs, for reductions, pipeline links and expert exchanges."""

SCHEMES: Mapping[str, Callable[..., Scheme]] = {"powersgd": PowerSGD, "dgc": DGC, "auto": Auto}
"""Schemes for gradients only."""

_OF_SCHEMES: Mapping[Any, set[str]] = {AllToAll: {"feedback"}, AllGather: {"feedback", "dense_below"}}
"""Options of the scheme that a codec's name may have in addition to the codec's options."""

Compression = str | Codec | Scheme
"""Values of `compression=`: a name, with options after a colon, or an object."""


def codec_of(given: str | Codec) -> Codec:
    """Return the codec of a name, or the given codec. Raises UsageError for other values."""
    if not isinstance(given, str):
        if isinstance(given, Codec):
            return given
        raise UsageError(f"expected a codec or its name, got {given!r}; names are {', '.join(CODECS)}")
    name, options = _parse(given)
    if name not in CODECS:
        raise UsageError(f"unknown codec {name!r}; known are {', '.join(CODECS)}{suggest(name, CODECS)}")
    return _make(CODECS[name], given, options)  # type: ignore[no-any-return]


def scheme_of(given: Compression) -> Scheme | None:
    """Return the scheme for reducing gradients; None for "none". Raises UsageError for an unknown name or option."""
    if isinstance(given, str):
        if given.startswith(AUTO_OF):  # the name of an Auto, which ranks exchange
            return Auto(tuple(codec_of(one) for one in given.removeprefix(AUTO_OF).split(", ")))
        name, options = _parse(given)
        if name == "none" and not options:
            return None
        if name in SCHEMES:
            return _make(SCHEMES[name], given, options)  # type: ignore[no-any-return]
        if name not in CODECS:
            known = "none", *CODECS, *SCHEMES
            raise UsageError(f"unknown compression {name!r}; known are {', '.join(known)}{suggest(name, known)}")
        kind = AllToAll if _make(CODECS[name], given, {}).fixed else AllGather
        own = {key: options.pop(key) for key in _OF_SCHEMES[kind] & options.keys()}
        return _make(partial(kind, _make(CODECS[name], given, options)), given, own)  # type: ignore[no-any-return]
    if isinstance(given, Scheme):
        return given
    if isinstance(given, Codec):
        return AllToAll(given) if given.fixed else AllGather(given)
    raise UsageError(
        f"compression must be a name, a codec or a scheme, got {given!r}; names are none, "
        f"{', '.join((*CODECS, *SCHEMES))}"
    )


def _parse(text: str) -> tuple[str, dict[str, str]]:
    """Return a name, and the options after its colon. Raises UsageError for a malformed option."""
    name, _, rest = text.partition(":")
    options = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise UsageError(f"compression {text!r}: expected option=value after the colon, got {item!r}")
        options[key.strip()] = value.strip()
    return name.strip(), options


def _make(maker: Callable[..., Any], text: str, options: Mapping[str, str]) -> Any:
    """Call `maker` with options given as text. Raises UsageError for an unknown option or a bad value."""
    kind: Any = maker.func if isinstance(maker, partial) else maker
    assert is_dataclass(kind)
    bound = len(maker.args) if isinstance(maker, partial) else 0
    known = {field.name: field for field in fields(kind)[bound:] if field.init}
    values = {}
    for key, value in options.items():
        if key not in known:
            hint = suggest(key, known)
            raise UsageError(
                f"compression {text!r}: unknown option {key!r}; known are {', '.join(known) or 'none'}{hint}"
            )
        values[key] = _read(value, str(known[key].type), f"compression {text!r}: {key}")
    return maker(**values)


_WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def _read(text: str, kind: str, what: str) -> Any:
    """Parse the value of an option whose annotation is `kind`."""
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
