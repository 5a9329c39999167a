"""The choice of a format, by the names that the command knows."""

from __future__ import annotations

from commlib.bench.formats.base import Format, Heading
from commlib.bench.formats.nccl import Nccl
from commlib.bench.formats.osu import Osu


def named(name: str, heading: Heading) -> Format:
    """Return the format of one of the names in `options.FORMATS`."""
    return Nccl(heading) if name == "nccl" else Osu(heading)
