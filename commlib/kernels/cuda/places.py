"""Random places in an array: draw them, and read and write elements there. See `kernels.host.draw`."""

from __future__ import annotations

from typing import Any

from commlib.kernels.cuda.arguments import f32, pointer_to, u32, u64
from commlib.kernels.cuda.launcher import LaunchedKernels


class PlaceKernels(LaunchedKernels):
    def draw(self, count: int, seed: int, places: Any) -> None:
        arguments = u64(count), u64(seed % 2**64), pointer_to(places), u64(len(places))
        self._launch("places.cu", "draw", {}, _divide_up(len(places), 32), *arguments)

    def take(self, x: Any, before: Any, after: Any, places: Any, scale: float, values: Any) -> None:
        # Places must be distinct: at a repeated place, the residual would be undefined.
        broken = self._scratch(4)
        self._launch("places.cu", "begin", {}, 1, pointer_to(broken))
        arrays = pointer_to(x), pointer_to(before), pointer_to(after)
        self._launch("places.cu", "feed_back", {}, _divide_up(len(x), 128), *arrays, u64(len(x)), pointer_to(broken))
        source = x if before is None else after
        chosen = pointer_to(source), pointer_to(places), u64(len(places)), f32(scale), pointer_to(values)
        self._launch(
            "places.cu", "take", {}, _divide_up(len(places), 32), *chosen, pointer_to(broken), u32(before is not None)
        )

    def place(self, values: Any, places: Any, out: Any) -> None:
        arguments = pointer_to(values), pointer_to(places), u64(len(places)), pointer_to(out)
        self._launch("places.cu", "place", {}, _divide_up(len(places), 32), *arguments)


def _divide_up(count: int, share: int) -> int:
    return -(-count // share)
