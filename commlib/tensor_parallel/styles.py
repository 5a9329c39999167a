"""Styles: how a layer is divided among the ranks of an axis. [pure]"""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, fields

from commlib.errors import UsageError
from commlib.schedule.layout import even


@dataclass(frozen=True, slots=True)
class Column:
    """Divide a layer's outputs: features of a linear layer, heads of attention, channels of a convolution.

    Its input is whole on every rank, or with `sequence` its shards along that dimension are gathered. Its output stays
    divided, for a `Row` to follow, unless `gather`. parts: several weights in one, as fused Q, K and V or gate and up
    are, as a number of equal ones or their lengths; each is divided by itself. units: what stays whole, such as the
    number of heads (those of K and V, where these have fewer); or a number for each part. What has fewer units than
    there are ranks, and divides their number, is shared by as many: Column(parts=(512, 64, 64), units=(8, 1, 1)).
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
        """Whether what has fewer units than there are ranks is shared by some: of one part, or units of each."""
        return self.parts == 1 or not isinstance(self.units, int)


@dataclass(frozen=True, slots=True)
class Row:
    """Divide a layer's inputs: its input is divided as the output of a `Column` is, its output is added up.

    The bias is added once, after that. The output is whole on every rank, or with `sequence` divided along that
    dimension. split: the input is whole, and each rank takes its part. units: as for the `Column` before it.
    """

    split: bool = False
    units: int = 0
    sequence: int | None = None

    def __post_init__(self) -> None:
        _check_units("Row", self.units)
        _check_dim("Row", self.sequence)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Divide the rows of an embedding, or of the linear layer that makes logits, by words.

    An embedding's output is whole, or with `sequence` divided along that dimension. Logits stay divided for
    `vocabulary_cross_entropy`, unless `gather`; with `sequence` their input is gathered along it. Of divided logits any
    other loss, and an argmax, would be that of this rank's words: nothing can tell that, so gather them for these.
    """

    gather: bool = False
    sequence: int | None = None

    def __post_init__(self) -> None:
        _check_dim("Vocabulary", self.sequence)


@dataclass(frozen=True, slots=True)
class Sequence:
    """Leave a layer's weights whole, for an input that is divided along `dim`: norms and dropout between blocks.

    Each rank has a part of the gradient of its weights; these are added. Dropout draws other masks on each rank: give
    it this style, too, where features are divided (-1), between a `Column` and its `Row`. What has weights for each
    feature there, as batch norms have, is divided with them, along the dimension of features: 1 in PyTorch.
    """

    dim: int = 1

    def __post_init__(self) -> None:
        _check_dim("Sequence", self.dim)


@dataclass(frozen=True, slots=True)
class Replicate:
    """Leave a layer whole on every rank.

    into_sharded: its output is used together with what is divided, as K and V of one head for all are: then each rank
    has a part of its gradient, and these are added.
    """

    into_sharded: bool = False


@dataclass(frozen=True, slots=True)
class PerRank:
    """Give a rank its part of a number: an attribute of a module that asks for as many heads, or features, in shapes.

    It is named as a layer is: {"h.0.attn.num_heads": PerRank(12)}. units: as for the `Column` whose heads it counts.
    among: how many ranks divide it, if not all: those that share a head of keys, of how often that is repeated.
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
    """Give a module this rank's part of an argument that has something for each head, such as biases of ALiBi.

    It is named as a layer is: {"h.0.attn.alibi": Slice(0, 12)}. dim: that of the argument which has heads, or, as often
    as it has them, batches of heads. units: how many heads there are. What has length 1 there is for all, and stays.
    No gradient goes through it but that of this rank's heads: it is for what has none.
    """

    dim: int
    units: int

    def __post_init__(self) -> None:
        _check_units("Slice", self.units)
        _check_dim("Slice", self.dim)


Style = Column | Row | Vocabulary | Sequence | Replicate | PerRank | Slice


def _lengths(style: str, parts: Sequence_[int]) -> tuple[int, ...]:
    found = tuple(parts)
    if not found or not all(isinstance(part, int) and part > 0 for part in found):
        raise UsageError(f"{style}: parts are {list(found)}, expected a number, or the lengths of the parts")
    return found


def _check_units(style: str, units: int) -> None:
    if not isinstance(units, int) or units < 0:
        raise UsageError(f"{style}: units is {units!r}, expected how many pieces stay whole, such as heads")


def _check_dim(style: str, dim: int | None) -> None:
    if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int)):
        raise UsageError(f"{style}: the dimension of the sequence is {dim!r}, expected a number such as 1")


def brief(style: Style) -> str:
    """Return a style as it would be written: with what is not as by default."""
    if isinstance(style, Slice):
        return f"Slice({style.dim}, {style.units})"
    plain = type(style)()
    changed = [f for f in fields(style) if getattr(style, f.name) != getattr(plain, f.name)]
    return f"{type(style).__name__}({', '.join(f'{f.name}={getattr(style, f.name)}' for f in changed)})"
