"""Random places in an array, what is there, and what comes there. See `kernels.host.draw`."""

from __future__ import annotations

from typing import Any

from commlib.kernels.cuda.arguments import at, f32, u32, u64
from commlib.kernels.cuda.launcher import Launcher


def draw(launcher: Launcher, count: int, seed: int, places: Any) -> None:
    arguments = u64(count), u64(seed % 2**64), at(places), u64(len(places))
    launcher.launch("places.cu", "draw", {}, _up(len(places), 32), *arguments)


def take(launcher: Launcher, x: Any, before: Any, after: Any, places: Any, scale: float, values: Any) -> None:
    """Take from different places: of one that is there twice the residual would be either's."""
    broken = launcher.scratch(4)
    launcher.launch("places.cu", "begin", {}, 1, at(broken))
    arrays = at(x), at(before), at(after)
    launcher.launch("places.cu", "feed_back", {}, _up(len(x), 128), *arrays, u64(len(x)), at(broken))
    source = x if before is None else after
    chosen = at(source), at(places), u64(len(places)), f32(scale), at(values)
    launcher.launch("places.cu", "take", {}, _up(len(places), 32), *chosen, at(broken), u32(before is not None))


def place(launcher: Launcher, values: Any, places: Any, out: Any) -> None:
    arguments = at(values), at(places), u64(len(places)), at(out)
    launcher.launch("places.cu", "place", {}, _up(len(places), 32), *arguments)


def _up(count: int, share: int) -> int:
    return -(-count // share)
