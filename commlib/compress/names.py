"""Schemes and codecs by name: "int8", "int4:rounding=stochastic", "topk:ratio=0.01", "powersgd:rank=4"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from commlib.compress.auto import Auto
from commlib.compress.codec import Codec
from commlib.compress.codecs import CODECS, codec_of, make, parse
from commlib.compress.dgc import DGC
from commlib.compress.exchange import Exchanged
from commlib.compress.gather import Gathered
from commlib.compress.power_sgd import PowerSGD
from commlib.compress.scheme import Scheme
from commlib.errors import UsageError

__all__ = ["CODECS", "SCHEMES", "Compression", "codec_of", "scheme_of"]

SCHEMES: Mapping[str, Callable[..., Scheme]] = {"powersgd": PowerSGD, "dgc": DGC, "auto": Auto}
"""What is for gradients only."""

_OF_SCHEMES: Mapping[Any, set[str]] = {Exchanged: {"feedback"}, Gathered: {"feedback", "dense_below"}}
"""Options that a codec's name may have beside its own: those of what reduces with it."""

Compression = str | Codec | Scheme
"""What `compression=` takes: a name, with options after a colon, or an object."""


def scheme_of(given: Compression) -> Scheme | None:
    """Return how to reduce gradients; None for "none". Raises UsageError for an unknown name or option."""
    if isinstance(given, str):
        name, options = parse(given)
        if name == "none" and not options:
            return None
        if name in SCHEMES:
            return make(SCHEMES[name], given, options)  # type: ignore[no-any-return]
        if name not in CODECS:
            raise UsageError(f"unknown compression {name!r}; known are none, {', '.join((*CODECS, *SCHEMES))}")
        kind = Exchanged if make(CODECS[name], given, {}).fixed else Gathered
        own = {key: options.pop(key) for key in _OF_SCHEMES[kind] & options.keys()}
        return make(partial(kind, make(CODECS[name], given, options)), given, own)  # type: ignore[no-any-return]
    if isinstance(given, Scheme):
        return given
    if isinstance(given, Codec):
        return Exchanged(given) if given.fixed else Gathered(given)
    raise UsageError(
        f"compression must be a name, a codec or a scheme, got {given!r}; names are none, "
        f"{', '.join((*CODECS, *SCHEMES))}"
    )
