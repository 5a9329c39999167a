"""The time of a collective before any machine runs it: what `schedule.simulate` would say, in microseconds.

A message of n bytes takes alpha + n beta, combining or copying n bytes takes n gamma, every rank has one port in each
direction (the model of `schedule.simulate`, whose time of a run grows with P^2 messages for a ring). Three ways:

- *lock step*: where all ranks do the same in every round, the rounds of one rank are added up (`rounds`). Exact;
- *formulas* for data that flows through trees and chains in segments (`segmented`). Exact for most;
- for what is only approximate, the simulation itself where few messages are involved.

`nbytes` is always the size of a verb's first region: what a rank brings (all_reduce, reduce, reduce_scatter, broadcast,
all_to_all) or, for all_gather and gather, what is gathered in all; for scatter, what the root brings.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf, sqrt

from commlib.cost import rounds, segmented
from commlib.cost.rounds import costs, walks
from commlib.cost.segmented import PIPELINES
from commlib.errors import UsageError
from commlib.schedule import Algorithm, Link, estimate, find

APPROXIMATE = rounds.APPROXIMATE | segmented.APPROXIMATE
"""The predictions that are not exact, and by which fraction they may be off with more than `FEW_MESSAGES`."""

FEW_MESSAGES = 64  # about half a millisecond of simulation

# A segment below 64 KiB takes about as long as the message costs that carries it. One above 1 MiB, or the piece that
# it is combined with, no longer stays in a core's cache; every segment under way needs that much staging memory; and
# the executor needs many of them to keep a link busy while hosts take turns.
LEAST_SEGMENT, LARGEST_SEGMENT = 64 << 10, 1 << 20

# On a slow link a segment travels at once, without asking the receiver first: Open MPI sends up to 64 KiB of TCP so,
# headers included. Else the question and its answer queue behind what is under way (with 62 KiB 95 % of 1 Gbit/s were
# reached, with 256 KiB and 1 MiB 80 to 90 %). Slow is where such a segment takes longer than Python does for it.
AT_ONCE, _SLOW_SECONDS = 60 << 10, 40e-6

# Larger messages took up to twice as long there (4 hosts at 0.1 and 1 Gbit/s: an all-gather by recursive doubling 1.6
# to 2 times a ring's in small segments). What cannot be cut is ranked as if it took this many times as long, because
# the model has to be outvoted: it counts an alpha for each segment, though those of segments under way overlap.
_ASKING = 3.0

# Of these every part of the data is treated alike, so they run over blocks of it. Of the others each chunk is cut, and
# the pieces of several chunks do not lie side by side: where a message has several, nothing is cut.
_IN_BLOCKS = ("all_reduce", "reduce", "broadcast")


@dataclass(frozen=True, slots=True)
class Machine:
    """Describe a cluster to this model: the links within a node and between nodes, and `gamma`.

    gamma: seconds for each byte that a rank combines or copies.
    """

    node: Link
    network: Link
    gamma: float


DEFAULT = Machine(
    node=Link(alpha=5e-6, beta=1 / 5e9),  # a message through Python and MPI's shared memory: two copies
    network=Link(alpha=20e-6, beta=1 / 10e9),  # Python on both sides dwarfs a fabric's 2 us; 100 Gbit/s, less overhead
    gamma=1 / 8e9,  # one core that reads two streams and writes one, beyond the caches
)
"""A cluster with a fabric (InfiniBand or the like), where nothing has been measured. `commlib tune` measures."""

ETHERNET = Machine(DEFAULT.node, Link(alpha=30e-6, beta=1 / 1.2e9), DEFAULT.gamma)
"""One without: TCP over 10 Gbit/s, where nothing has been measured."""


def predict(
    verb: str, algorithm: str, size: int, nbytes: float, link: Link, gamma: float, *, segments: int = 1
) -> float:
    """Return the seconds that an algorithm takes on `size` ranks with the same link between any two.

    segments: for the algorithms that are `segmented`, the pieces in their pipeline. For the others, into how many
    pieces the executor cuts every message, so that combining one hides behind the transfer of the next: a round then
    takes segments * alpha + beta c + gamma c / segments. Raises UsageError for arguments that make no sense.
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
    """Return how many messages a simulation would have, about."""
    if algorithm.segmented:  # every chunk goes up a tree, and down
        return 2 * (size - 1) * algorithm.regions(size, segments)[0]
    return size * costs(algorithm.verb, algorithm.name, size, segments)[0].messages


def largest_segment(link: Link) -> int:
    """Return the bytes of the largest segment that is to travel over a link."""
    return AT_ONCE if _is_slow(link) else LARGEST_SEGMENT


def _is_slow(link: Link) -> bool:
    return link.beta * AT_ONCE > _SLOW_SECONDS


def _largest_message(verb: str, algorithm: str, size: int, nbytes: float, segments: int) -> float:
    """Return the bytes of the largest message of an algorithm that is no pipeline; 0 for one that is."""
    chosen = find(verb, algorithm)
    if chosen.segmented or not chosen.regions(size, 1):
        return 0.0
    chunk = nbytes / chosen.regions(size, 1)[0]
    steps = [step for walk in walks(verb, algorithm, size, 1) for step in walk if step.messages]
    return max((step.chunks / step.messages for step in steps), default=0.0) * chunk / segments


def segments_for(chunk_bytes: float, rounds: int, link: Link, gamma: float) -> int:
    """Return into how many segments to cut the `chunk_bytes` that a rank receives and combines in each of its `rounds`.

    In B segments a round takes T(B) = B alpha + beta c + gamma c / B, least at B = sqrt(gamma c / alpha). Where nothing
    is combined (gamma = 0, no rounds) there is nothing to hide, and nothing to stage: 1.
    """
    if rounds < 1 or gamma <= 0 or chunk_bytes <= LEAST_SEGMENT:
        return 1
    most = int(chunk_bytes // LEAST_SEGMENT)
    least = ceil(chunk_bytes / largest_segment(link))
    best = sqrt(gamma * chunk_bytes / link.alpha) if link.alpha > 0 else inf
    return max(least, round(min(best, most)))


def best(verb: str, algorithm: str, size: int, nbytes: float, link: Link, gamma: float) -> tuple[int, float]:
    """Return the best number of segments, and the seconds that are predicted with it."""
    segments = best_segments(verb, algorithm, size, nbytes, link, gamma)
    seconds = predict(verb, algorithm, size, nbytes, link, gamma, segments=segments)
    asks = _is_slow(link) and _largest_message(verb, algorithm, size, nbytes, segments) > AT_ONCE
    return segments, seconds * _ASKING if asks else seconds


def best_segments(verb: str, algorithm: str, size: int, nbytes: float, link: Link, gamma: float) -> int:
    """Return the number of segments with the least predicted time."""
    check(f"{verb} {algorithm}", size=size, nbytes=nbytes)
    chosen = find(verb, algorithm)
    if chosen.segmented:
        options = _pipeline_options(chosen, size, nbytes, largest_segment(link))
        return min(options, key=lambda s: predict(verb, algorithm, size, nbytes, link, gamma, segments=s))
    steps = walks(verb, algorithm, size, 1)[-1]  # of the rank that combines most
    cost = costs(verb, algorithm, size, 1)[-1]
    at_once = ceil(_largest_message(verb, algorithm, size, nbytes, 1) / AT_ONCE) if _is_slow(link) else 1
    if not cost.combined and all(step.chunks <= step.messages for step in steps):
        return max(1, at_once)
    if not cost.combined or (verb not in _IN_BLOCKS and any(step.chunks > step.messages for step in steps)):
        return 1
    chunk = nbytes / chosen.regions(size, 1)[0]
    # Rounds differ, and those without combining pay alpha as well: so the mean over all messages.
    segments = segments_for(cost.combined * chunk / cost.messages, cost.messages, link, gamma)
    largest = max(step.combined / step.messages for step in steps if step.messages) * chunk
    return max(segments, at_once, ceil(largest / largest_segment(link)))


def _pipeline_options(algorithm: Algorithm, size: int, nbytes: float, largest: int) -> list[int]:
    """Return the powers of two that cut `nbytes` into pieces of a sensible size."""
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
