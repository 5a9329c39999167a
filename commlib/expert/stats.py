"""ExpertStats: the load of experts, added up over calls and ranks, and drawn as bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from commlib.communicator import Communicator
from commlib.dtypes import Array
from commlib.expert.routing import Routing

_BAR = "▏▎▍▌▋▊▉█"


@dataclass(frozen=True, slots=True)
class ExpertStats:
    """Statistics of the routing of `tokens` tokens. load: the share of each expert in all choices, before dropping.

    drop_rate: the share of choices that were dropped. imbalance: the load of the busiest expert divided by the mean; 1
    is even. entropy: mean entropy of tokens' scores, in nats; even scores have the logarithm of the number of experts.
    """

    tokens: int
    load: tuple[float, ...]
    drop_rate: float
    imbalance: float
    entropy: float

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens, imbalance {self.imbalance:.2f}, dropped {self.drop_rate:.1%}, "
            f"entropy {self.entropy:.2f}"
        )

    def bars(self, width: int = 40) -> str:
        """Draw the load, a line for each expert; a full bar is the load of the busiest one."""
        most = max(self.load, default=0.0) or 1.0
        return "\n".join(
            f"{number:>4} {_bar(share / most, width)} {share:6.1%}" for number, share in enumerate(self.load)
        )


def _bar(share: float, width: int) -> str:
    eighths = round(share * width * 8)
    whole, rest = divmod(eighths, 8)
    drawn = "█" * whole + (_BAR[rest - 1] if rest else "")
    return drawn.ljust(width)


class RoutingCounter:
    """Adds up the routings of one layer on one rank."""

    def __init__(self, experts: int) -> None:
        self.numbers = np.zeros(experts + 3)
        """How often each expert was chosen, then the sums of tokens, dropped choices, and entropies."""

    def add(self, routing: Routing, tokens: int) -> None:
        """Add the routing of `tokens` tokens."""
        self.numbers[:-3] += routing.load
        self.numbers[-3:] += tokens, routing.dropped, routing.entropy * tokens


def gather_stats(counted: Sequence[RoutingCounter], comm: Communicator) -> list[ExpertStats]:
    """Return the statistics of layers over all ranks since the last call. Collective, one small message."""
    together: Array = comm.all_reduce(np.concatenate([one.numbers for one in counted]))
    result = []
    for one in counted:
        mine, together = together[: len(one.numbers)], together[len(one.numbers) :]
        result.append(_stats(mine))
        one.numbers[:] = 0
    return result


def _stats(numbers: Array) -> ExpertStats:
    load, (tokens, dropped, entropy) = numbers[:-3], numbers[-3:]
    choices = float(load.sum())
    return ExpertStats(
        int(tokens),
        tuple(float(each) / (choices or 1.0) for each in load),
        float(dropped) / (choices or 1.0),
        float(load.max() / load.mean()) if choices else 1.0,
        float(entropy) / (float(tokens) or 1.0),
    )


def draw_stats(stats: Mapping[str, ExpertStats], width: int = 40) -> str:
    """Draw the stats of layers, by name."""
    return "\n".join(f"{name}: {each}\n{each.bars(width)}" for name, each in stats.items())
