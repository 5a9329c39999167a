"""DualPipeV: two stages on each rank, placed as a V; forwards overlap with backwards of other microbatches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from commlib.pipeline.schedule.ir import Action, Kind
from commlib.pipeline.schedule.registry import place_folded, plan


class _Rank:
    """Counts the actions of one rank in its two stages, 0 on the way down and 1 on the way up."""

    def __init__(self, stages: tuple[int, int]) -> None:
        self._stages = stages
        self._forwards, self._backwards = [0, 0], [0, 0]
        self._weights: deque[Action] = deque()

    def forward(self, chunk: int) -> Iterator[Action]:
        yield Action(self._stages[chunk], Kind.F, self._forwards[chunk])
        self._forwards[chunk] += 1

    def backward(self, chunk: int, *, split: bool = False) -> Iterator[Action]:
        stage, microbatch = self._stages[chunk], self._backwards[chunk]
        self._backwards[chunk] += 1
        yield Action(stage, Kind.I if split else Kind.B, microbatch)
        if split:
            self._weights.append(Action(stage, Kind.W, microbatch))

    def weight(self) -> Iterator[Action]:
        yield self._weights.popleft()


@plan("dualpipev", chunks=2, place=place_folded, enough=lambda ranks, microbatches: max(microbatches, 2 * ranks))
def dualpipev(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Pairs forwards on the way down with backwards on the way up, and vice versa, to hide messages.

    Idle for (p/2 - 1)(F&B + B - 3W) by its authors' count, where F&B runs both at once. Holds at most 2p + 1 stage
    activations, each half as large as in 1F1B. In this implementation F and B run one after the other, on one stream.
    DeepSeek-AI, DualPipe, 2025, with the "cut-in-half" of Qi et al.; it has the phases of the published schedule.
    """
    me, behind = _Rank((rank, 2 * ranks - 1 - rank)), ranks - rank - 1
    for _ in range(2 * behind):
        yield from me.forward(0)
    for _ in range(rank + 1):
        yield from me.forward(0)
        yield from me.forward(1)
    for _ in range(behind):
        yield from me.backward(1, split=True)
        yield from me.weight()
        yield from me.forward(1)
    for _ in range(microbatches - 2 * ranks + rank + 1):
        yield from me.forward(0)
        yield from me.backward(1)
        yield from me.forward(1)
        yield from me.backward(0)
    for _ in range(behind):
        yield from me.backward(1)
        yield from me.forward(1)
        yield from me.backward(0)
    # Split backwards from the middle pair on: on odd ranks from its first backward, on even ranks from its second.
    for pair in range(rank + 1):
        half = (rank + 1) // 2
        yield from me.backward(1, split=pair > half or (pair == half and rank % 2 == 1))
        yield from me.backward(0, split=pair >= half)
    for _ in range(behind):
        yield from me.weight()
        yield from me.backward(0, split=True)
    for _ in range(rank + 1):
        yield from me.weight()
