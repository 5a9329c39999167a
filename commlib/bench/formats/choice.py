"""Choice: look up a format by its name in the command."""

from __future__ import annotations

from commlib.bench.formats.base import Format, Heading
from commlib.bench.formats.nccl import NcclFormat
from commlib.bench.formats.osu import OsuFormat


def find_format(name: str, heading: Heading) -> Format:
    """Return the format of one of the names in `options.FORMATS`."""
    return NcclFormat(heading) if name == "nccl" else OsuFormat(heading)
