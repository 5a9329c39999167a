"""Head units: split heads of queries among ranks, together with their heads of keys and values. [pure]"""

from __future__ import annotations

from commlib.errors import UsageError


def units_of_queries(queries: int, keys: int, size: int) -> int:
    """Return the number of units in which query heads are split among `size` ranks, with their key and value heads.

    Groups of queries with one head of keys are not split if there is at least one for each rank. Fewer heads of keys
    are shared if they divide the number of ranks: equally many ranks have each head, with some of its queries.
    Otherwise 0.
    """
    if keys >= size:
        return keys
    goes_up = queries % size == 0 or keys == 1
    return queries if size % keys == 0 and queries >= size and goes_up else 0


def check_attention(what: str, width: int, heads: int, kv_heads: int, dropout: float) -> None:
    """Raise UsageError for sizes of attention that do not divide each other, and for a share of dropped weights."""
    if heads < 1 or width % heads or kv_heads < 1 or heads % kv_heads:
        raise UsageError(
            f"{what}: width {width}, {heads} heads, {kv_heads} of K and V: each must be a multiple of the next"
        )
    if not 0 <= dropout < 1:
        raise UsageError(f"{what}: dropout is {dropout}, expected at least 0, and less than 1")
