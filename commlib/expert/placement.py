"""ExpertPlacement: the rank of each expert. [pure]"""

from __future__ import annotations

from dataclasses import dataclass

from commlib.errors import UsageError
from commlib.schedule.layout import even


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """The rank of each expert: `owners[expert]`, with experts numbered over all ranks. A rank orders its own ascending.

    Every rank has at least one expert.
    """

    owners: tuple[int, ...]
    ranks: int

    def __post_init__(self) -> None:
        if set(self.owners) != set(range(self.ranks)):
            raise UsageError(
                f"experts: {len(self.owners)} experts on {self.ranks} ranks, as {list(self.owners)}: every rank needs "
                "at least one. Use a smaller expert axis, or more experts"
            )

    @classmethod
    def even(cls, experts: int, ranks: int) -> ExpertPlacement:
        """Return contiguous blocks of experts; if they are uneven, the first ranks have one more. Raises UsageError."""
        counts = even(experts, ranks).counts
        return cls(tuple(rank for rank, count in enumerate(counts) for _ in range(count)), ranks)

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """Return the experts of a rank, in its order."""
        return tuple(expert for expert, owner in enumerate(self.owners) if owner == rank)

    @property
    def order(self) -> tuple[int, ...]:
        """The experts of rank 0, then those of rank 1, and so on."""
        return tuple(sorted(range(len(self.owners)), key=lambda expert: (self.owners[expert], expert)))
