"""CompressedBuckets: buckets of gradients that are compressed, and reduced by name.

What a bucket is made of stands in its request. So a rank that has joined can do its part. A rank that comes back goes
on with what it remembers.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from commlib.compress import GradientCompression, Part, scheme_of
from commlib.compress.bucket import CompressedBucket
from commlib.coordinator.request import Request
from commlib.dtypes import Array

MAKE, REDUCE = "compression", "compressed_bucket"
"""The verbs: make the compression of a set of buckets; reduce one of them."""


def making(family: str, scheme: str, *, within_node: bool, count: int) -> Request:
    """Return the request for the compression of the buckets of a `family`: see `GradientCompression`."""
    options = (("scheme", scheme), ("within_node", int(within_node)), ("count", count))
    return Request(MAKE, family, (), options, repeats=False)


def reducing(family: str, moves: int, key: str, count: int, parts: list[Part], flags: int, op: str) -> Request:
    """Return the request for one bucket of a family whose buckets were made anew `moves` times."""
    described = json.dumps([(part.name, part.start, part.shape) for part in parts])
    options = (("family", family), ("moves", moves), ("key", key), ("parts", described), ("flags", flags), ("op", op))
    return Request(REDUCE, f"{family}.{key}", (("float32", (count,)),), options)


class CompressedBuckets:
    """Keep the compressed buckets of one process set. Ranks call `make` and `run` for the same requests in order."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._families: dict[str, GradientCompression] = {}
        self._moves: dict[str, int] = {}
        self._made: dict[str, tuple[Request, CompressedBucket]] = {}

    def make(self, request: Request) -> GradientCompression:
        """Return how the buckets of a family are compressed. Collective."""
        made = GradientCompression(
            self._comm,
            scheme_of(str(request.option("scheme"))),
            within_node=bool(request.option("within_node")),
            count=int(request.option("count")),
        )
        self._families[request.name] = made
        return made

    def reduction(self, name: str) -> CompressedBucket | None:
        """Return what reduces a bucket, once it was reduced."""
        made = self._made.get(name)
        return None if made is None else made[1]

    def run(self, request: Request, array: Array | None) -> None:
        """Reduce a bucket in its array; None where this rank has joined, which adds nothing. Collective."""
        family, moves = str(request.option("family")), int(request.option("moves"))
        compression = self._families[family]
        if array is None and moves != self._moves.get(family, moves):
            compression.move()  # the others have, and this rank was not there
        self._moves[family] = moves
        mine: Array = np.zeros(request.tensors[0][1][0] or 0, np.float32) if array is None else array
        known = self._made.get(request.name)
        if known is None or known[0] != request:
            parts = [Part(name, start, tuple(shape)) for name, start, shape in json.loads(str(request.option("parts")))]
            key, flags, op = str(request.option("key")), int(request.option("flags")), str(request.option("op"))
            known = self._made[request.name] = request, compression.reduction(key, mine, parts, flags, op)
        reduction = known[1]
        reduction.use(mine)
        reduction()
        if array is None:
            reduction.end_step()
