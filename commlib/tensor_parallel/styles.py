"""Styles: kinds of sharding of a layer among the ranks of an axis. [pure]"""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, fields

from commlib.errors import UsageError
from commlib.schedule.layout import even


@dataclass(frozen=True, slots=True)
class Column:
    """Shard a layer's outputs: features of a linear layer, heads of attention, channels of a convolution.

    Args:
        parts: Several fused weights, such as Q, K and V or gate and up, as a number of equal ones or their lengths;
            each is sharded separately.
        units: Number of pieces that are not split, such as heads (of K and V, if these have fewer); or a number
            for each part. If there are fewer units than ranks, and they divide the number of ranks, several ranks share
            each: Column(parts=(512, 64, 64), units=(8, 1, 1)).
        gather: Whether the output is gathered on every rank; otherwise it stays sharded, for a `Row` to follow.
        sequence: The dimension along which the input's shards are gathered; None: the input is unsharded.

    Examples:
        plan = {"*.up": ct.Column(), "*.qkv": ct.Column(parts=3, units=heads)}
    """

    parts: int | tuple[int, ...] = 1
    units: int | tuple[int, ...] = 0
    gather: bool = False
    sequence: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.parts, int):
            object.__setattr__(self, "parts", _lengths("Column", self.parts))
        if isinstance(self.units, int):
            _check_units("Column", self.units)
        else:
            object.__setattr__(self, "units", tuple(self.units))
            count = self.parts if isinstance(self.parts, int) else len(self.parts)
            if len(self.units) != count:
                raise UsageError(
                    f"Column: units are {list(self.units)}, expected a number, or one for each of {count} parts"
                )
            for units in self.units:
                _check_units("Column", units)
        _check_dim("Column", self.sequence)

    @property
    def shares(self) -> bool:
        """Whether ranks may share units if there are fewer than ranks: with one part, or with units for each part."""
        return self.parts == 1 or not isinstance(self.units, int)


@dataclass(frozen=True, slots=True)
class Row:
    """Shard a layer's inputs: its input is sharded like the output of a `Column`, and its output is summed over ranks.

    The bias is added once, after the sum.

    Args:
        split: Whether the input is unsharded, and each rank takes its shard.
        units: As for the `Column` before it.
        sequence: The dimension along which the output is sharded; None: unsharded.

    Examples:
        plan = {"*.up": ct.Column(), "*.down": ct.Row()}
    """

    split: bool = False
    units: int = 0
    sequence: int | None = None

    def __post_init__(self) -> None:
        _check_units("Row", self.units)
        _check_dim("Row", self.sequence)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Shard an embedding's rows, or the outputs of the linear layer that makes logits, by words.

    Logits stay sharded for `vocabulary_cross_entropy`, unless `gather`. Any other loss, or an argmax, of sharded logits
    would use only this rank's words, which cannot be detected: gather them for these.

    Args:
        gather: Whether logits are gathered on every rank.
        sequence: Embedding: the dimension along which the output is sharded. Logits: the one along which the input's
            shards are gathered. None: unsharded.

    Examples:
        plan = {"*.words": ct.Vocabulary(), "*.logits": ct.Vocabulary()}
    """

    gather: bool = False
    sequence: int | None = None

    def __post_init__(self) -> None:
        _check_dim("Vocabulary", self.sequence)


@dataclass(frozen=True, slots=True)
class Sequence:
    """Keep a layer's weights unsharded, for an input that is sharded along `dim`: norms and dropout between blocks.

    Each rank has a partial gradient of its weights; these are summed. Dropout draws different masks on each rank: give
    it this style also for sharded features (-1), between a `Column` and its `Row`. Layers with weights for each
    feature, such as batch norms, are sharded with the features, along the feature dimension: 1 in PyTorch.

    Args:
        dim: The dimension along which the input is sharded; -1: features.

    Examples:
        plan = {"*.norm": ct.Sequence(1), "*.up": ct.Column(sequence=1), "*.down": ct.Row(sequence=1)}
    """

    dim: int = 1

    def __post_init__(self) -> None:
        _check_dim("Sequence", self.dim)


@dataclass(frozen=True, slots=True)
class Replicate:
    """Keep a layer unsharded on every rank.

    Args:
        into_sharded: Its output is combined with sharded values, such as K and V of one head for all: then each rank
            has a partial gradient of it, and these are summed.

    Examples:
        plan = {"*.kv": ct.Replicate(into_sharded=True), "*.q": ct.Column(units=heads)}
    """

    into_sharded: bool = False


@dataclass(frozen=True, slots=True)
class PerRank:
    """Give a rank its part of a number: an attribute of a module with a number of heads, or features, used in shapes.

    It is named like a layer: {"h.0.attn.num_heads": PerRank(12)}.

    Args:
        units: As for the `Column` whose heads it counts.
        among: Number of ranks that split it, if not all: for a repeat count, the ranks that share a head of keys.

    Examples:
        plan = {"h.*.attn.num_heads": ct.PerRank(12), "h.*.attn.qkv": ct.Column(parts=3, units=12)}
    """

    units: int = 0
    among: int = 0

    def __post_init__(self) -> None:
        _check_units("PerRank", self.units)
        if not isinstance(self.among, int) or self.among < 0:
            raise UsageError(f"PerRank: among is {self.among!r}, expected a number of ranks, or 0 for all")

    def own(self, whole: int, rank: int, size: int) -> int:
        """Return the number of one of `size` ranks."""
        units, ranks = self.units or whole, self.among or size
        return whole * even(units, ranks).counts[rank % ranks] // units


@dataclass(frozen=True, slots=True)
class Slice:
    """Give a module this rank's slice of an argument with an entry for each head, such as biases of ALiBi.

    It is named like a layer: {"h.0.attn.alibi": Slice(0, 12)}.

    Args:
        dim: The dimension of the argument that has heads, or batches times heads.
        units: Number of heads. An argument of length 1 there serves all heads, and is not sliced. Only the gradient of
            this rank's heads flows through it, so it is meant for arguments without one.

    Examples:
        plan = {"h.*.attn.alibi": ct.Slice(0, 12), "h.*.attn.qkv": ct.Column(parts=3, units=12)}
    """

    dim: int
    units: int

    def __post_init__(self) -> None:
        _check_units("Slice", self.units)
        _check_dim("Slice", self.dim)


Style = Column | Row | Vocabulary | Sequence | Replicate | PerRank | Slice


def _lengths(style: str, parts: Sequence_[int]) -> tuple[int, ...]:
    lengths = tuple(parts)
    if not lengths or not all(isinstance(part, int) and part > 0 for part in lengths):
        raise UsageError(f"{style}: parts are {list(lengths)}, expected a number, or the lengths of the parts")
    return lengths


def _check_units(style: str, units: int) -> None:
    if not isinstance(units, int) or units < 0:
        raise UsageError(f"{style}: units is {units!r}, expected a number of pieces that are not split, such as heads")


def _check_dim(style: str, dim: int | None) -> None:
    if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int)):
        raise UsageError(f"{style}: the dimension of the sequence is {dim!r}, expected a number such as 1")


def brief(style: Style) -> str:
    """Return a style as source text: only arguments that differ from the defaults."""
    if isinstance(style, Slice):
        return f"Slice({style.dim}, {style.units})"
    plain = type(style)()
    changed = [f for f in fields(style) if getattr(style, f.name) != getattr(plain, f.name)]
    return f"{type(style).__name__}({', '.join(f'{f.name}={getattr(style, f.name)}' for f in changed)})"
