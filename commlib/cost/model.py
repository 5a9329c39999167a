"""Cost model: predict the time of a collective, like `schedule.simulate` but in microseconds of computation.

A message of n bytes takes alpha + n beta, combining or copying n bytes takes n gamma, and every rank has one port in
each direction (the model of `schedule.simulate`, whose run time for a ring grows with P^2 messages). There are three
methods:

- *lock step*: where all ranks do the same in every round, the costs of one rank's rounds are added up (`rounds`);
- *formulas* for data that flows through trees and chains in segments (`segmented`). Most are exact;
- the simulation itself for approximate cases with few messages.

`nbytes` is always the size of a verb's first region: each rank's input (all_reduce, reduce, reduce_scatter, broadcast,
all_to_all), the whole result (all_gather, gather), or the root's input (scatter).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf, sqrt

from commlib.cost import rounds, segment_times
from commlib.cost.rounds import costs, rank_steps
from commlib.cost.segment_times import PIPELINES
from commlib.errors import UsageError
from commlib.schedule import Algorithm, LinkCost, estimate, find

APPROXIMATE = rounds.APPROXIMATE | segment_times.APPROXIMATE
"""The predictions that are not exact, each with its largest relative error beyond `FEW_MESSAGES`."""

FEW_MESSAGES = 64  # about half a millisecond of simulation

# Below 64 KiB the overhead of a message is as large as the transfer of its segment. Above 1 MiB a segment, or the data
# it is combined with, no longer fits a core's cache; each segment in flight needs that much staging memory; and the
# executor needs many segments to keep a link busy while hosts take turns.
LEAST_SEGMENT, LARGEST_SEGMENT = 64 << 10, 1 << 20

# On a slow link segments use MPI's eager protocol, which Open MPI has over TCP up to 64 KiB, headers included. Larger
# ones need a handshake, which queues behind the data in flight (62 KiB reached 95 % of 1 Gbit/s, 256 KiB and 1 MiB 80
# to 90 %). A link is slow if the transfer of such a segment takes longer than its handling in Python.
AT_ONCE, _SLOW_SECONDS = 60 << 10, 40e-6

# Larger messages took up to twice as long on slow links (4 hosts at 0.1 and 1 Gbit/s: an all-gather by recursive
# doubling took 1.6 to 2 times as long as a ring in small segments). Algorithms that cannot be segmented are ranked as
# if they took this many times as long. The factor is larger because the model counts an alpha for each segment, though
# the alphas of segments in flight overlap.
_ASKING = 3.0

# These verbs treat all parts of the data alike, so they can run over blocks of it. The other verbs cut each chunk. The
# pieces of several chunks are not contiguous, so programs with several chunks in a message are not cut.
_IN_BLOCKS = ("all_reduce", "reduce", "broadcast")


@dataclass(frozen=True, slots=True)
class Machine:
    """The parameters of a cluster: the links within a node and between nodes, and `gamma`.

    gamma: seconds for each byte that a rank combines or copies.
    """

    node: LinkCost
    network: LinkCost
    gamma: float


DEFAULT = Machine(
    node=LinkCost(alpha=5e-6, beta=1 / 5e9),  # a message through Python and MPI's shared memory: two copies
    network=LinkCost(alpha=20e-6, beta=1 / 10e9),  # Python's share exceeds a fabric's 2 us; 100 Gbit/s, less overhead
    gamma=1 / 8e9,  # one core that reads two streams and writes one, beyond the caches
)
"""Estimates for a cluster with a fabric such as InfiniBand. `commlib tune` replaces them by measured values."""

ETHERNET = Machine(DEFAULT.node, LinkCost(alpha=30e-6, beta=1 / 1.2e9), DEFAULT.gamma)
"""Estimates for a cluster without a fabric: TCP over 10 Gbit/s."""


def predict(
    verb: str, algorithm: str, size: int, nbytes: float, link: LinkCost, gamma: float, *, segments: int = 1
) -> float:
    """Return the seconds that an algorithm takes on `size` ranks with the same link between any two.

    segments: for `segmented` algorithms, the number of pieces in their pipeline. For the others, the number of pieces
    into which the executor cuts every message, to overlap combining one with the transfer of the next: a round then
    takes segments * alpha + beta c + gamma c / segments. Raises UsageError for invalid arguments.
    """
    chosen = find(verb, algorithm)
    check(f"{verb} {algorithm}", size=size, nbytes=nbytes, segments=segments)
    pieces, blocks = (segments, 1) if chosen.segmented else (1, segments)
    regions = chosen.regions(size, pieces)
    chunk = nbytes / regions[0] if regions else 0.0
    key = verb, algorithm
    if key in APPROXIMATE and blocks == 1 and simulated_messages(chosen, size, pieces) <= FEW_MESSAGES:
        return estimate(verb, algorithm, size, nbytes, link, gamma=gamma, segments=pieces).time
    if key in PIPELINES:
        return PIPELINES[key](size, pieces, link.alpha, link.beta * chunk, gamma * chunk)
    return max(
        blocks * cost.messages * link.alpha
        + cost.chunks * chunk * link.beta
        + (cost.combined / blocks + cost.copied) * chunk * gamma
        for cost in costs(verb, algorithm, size, pieces)
    )


def simulated_messages(algorithm: Algorithm, size: int, segments: int) -> int:
    """Return the approximate number of messages in a simulation."""
    if algorithm.segmented:  # every chunk goes up a tree, and down
        return 2 * (size - 1) * algorithm.regions(size, segments)[0]
    return size * costs(algorithm.verb, algorithm.name, size, segments)[0].messages


def largest_segment(link: LinkCost) -> int:
    """Return the size in bytes of the largest segment to send over a link."""
    return AT_ONCE if _is_slow(link) else LARGEST_SEGMENT


def _is_slow(link: LinkCost) -> bool:
    return link.beta * AT_ONCE > _SLOW_SECONDS


def _largest_message(verb: str, algorithm: str, size: int, nbytes: float, segments: int) -> float:
    """Return the bytes of the largest message of an algorithm; 0 for a pipeline."""
    chosen = find(verb, algorithm)
    if chosen.segmented or not chosen.regions(size, 1):
        return 0.0
    chunk = nbytes / chosen.regions(size, 1)[0]
    steps = [step for walk in rank_steps(verb, algorithm, size, 1) for step in walk if step.messages]
    return max((step.chunks / step.messages for step in steps), default=0.0) * chunk / segments


def segments_for(chunk_bytes: float, rounds: int, link: LinkCost, gamma: float) -> int:
    """Return the number of segments for the `chunk_bytes` that a rank receives and combines in each of its `rounds`.

    In B segments a round takes T(B) = B alpha + beta c + gamma c / B, which is least at B = sqrt(gamma c / alpha). If
    nothing is combined (gamma = 0, no rounds) there is nothing to overlap and nothing to stage: 1.
    """
    if rounds < 1 or gamma <= 0 or chunk_bytes <= LEAST_SEGMENT:
        return 1
    most = int(chunk_bytes // LEAST_SEGMENT)
    least = ceil(chunk_bytes / largest_segment(link))
    best = sqrt(gamma * chunk_bytes / link.alpha) if link.alpha > 0 else inf
    return max(least, round(min(best, most)))


def best(verb: str, algorithm: str, size: int, nbytes: float, link: LinkCost, gamma: float) -> tuple[int, float]:
    """Return the best number of segments, and the seconds predicted for it."""
    segments = best_segments(verb, algorithm, size, nbytes, link, gamma)
    seconds = predict(verb, algorithm, size, nbytes, link, gamma, segments=segments)
    needs_request = _is_slow(link) and _largest_message(verb, algorithm, size, nbytes, segments) > AT_ONCE
    return segments, seconds * _ASKING if needs_request else seconds


def best_segments(verb: str, algorithm: str, size: int, nbytes: float, link: LinkCost, gamma: float) -> int:
    """Return the number of segments with the least predicted time."""
    check(f"{verb} {algorithm}", size=size, nbytes=nbytes)
    chosen = find(verb, algorithm)
    if chosen.segmented:
        options = _pipeline_options(chosen, size, nbytes, largest_segment(link))
        return min(options, key=lambda s: predict(verb, algorithm, size, nbytes, link, gamma, segments=s))
    steps = rank_steps(verb, algorithm, size, 1)[-1]  # of the rank that combines most
    cost = costs(verb, algorithm, size, 1)[-1]
    at_once = ceil(_largest_message(verb, algorithm, size, nbytes, 1) / AT_ONCE) if _is_slow(link) else 1
    if not cost.combined and all(step.chunks <= step.messages for step in steps):
        return max(1, at_once)
    if not cost.combined or (verb not in _IN_BLOCKS and any(step.chunks > step.messages for step in steps)):
        return 1
    chunk = nbytes / chosen.regions(size, 1)[0]
    # Rounds differ, and rounds that combine nothing pay alpha as well, so use the mean over all messages.
    segments = segments_for(cost.combined * chunk / cost.messages, cost.messages, link, gamma)
    largest = max(step.combined / step.messages for step in steps if step.messages) * chunk
    return max(segments, at_once, ceil(largest / largest_segment(link)))


def _pipeline_options(algorithm: Algorithm, size: int, nbytes: float, largest: int) -> list[int]:
    """Return the powers of two that cut `nbytes` into segments of a useful size."""
    pieces = algorithm.regions(size, 1)[0]
    options = [1]
    while nbytes / (2 * options[-1] * pieces) >= min(LEAST_SEGMENT, largest / 2):
        options.append(2 * options[-1])
    if algorithm.verb == "broadcast":  # nothing is combined, so nothing is staged
        return options
    return [s for s in options if nbytes / (s * pieces) <= largest] or options[-1:]


def check(what: str, **values: float) -> None:
    """Raise UsageError unless all values are finite and at least 1 (nbytes: 0)."""
    for name, value in values.items():
        least = 0 if name == "nbytes" else 1
        if not least <= value < inf:
            raise UsageError(f"{what}: {name} must be at least {least}, and finite, got {value}")
