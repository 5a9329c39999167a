"""Experts: the user's settings of a mixture of experts. [pure]"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any, Literal, get_args

from commlib.arguments import suggest
from commlib.errors import UsageError

_ROUNDING = 1e-12  # 10 tokens times 1.1 are 11

Scores = Literal["softmax", "sigmoid"]
CapacityOver = Literal["rank", "all"]
Drop = Literal["position", "probability", "random"]
Second = Literal["all", "random"]
Choice = Literal["token", "expert"]
Balance = Literal["sequence", "microbatch", "global", "none"]
_WORDS: dict[str, tuple[str, ...]] = {
    "scores": get_args(Scores),
    "capacity_over": get_args(CapacityOver),
    "drop": get_args(Drop),
    "second": get_args(Second),
    "choice": get_args(Choice),
    "balance": get_args(Balance),
}
_OF_MLP = ("activation", "gated", "bias")
"""Settings that only the built-in MLP has, besides its features."""


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of `count` experts, and how tokens are routed to them.

    Args:
        count: The number of experts, on all ranks together.
        top_k: The number of experts of a token.
        scores: How logits become scores: "softmax" or "sigmoid".
        normalise: Whether the gates of a token add up to 1, over the experts that remain after dropping (GShard); None:
            if `top_k` is more than 1, since a router learns nothing from a gate that is always 1 (Switch).
        scale: Factor of the gates.
        groups: The number of equal groups that experts form, such as one for each node.
        max_groups: The groups in which a token has experts, at most: those with the highest sum of two best scores
            (DeepSeek-V3); None: all.
        second: "all"; or "random": in training the second of two experts is kept with twice the probability of its
            share in both (GShard).
        choice: "token"; or "expert": experts choose tokens, as many as their capacity (expert choice).
        jitter: In training the router's input is multiplied by a number within 1 -+ jitter.
        noise: In training the standard deviation of normal noise on logits.
        capacity_factor: An expert takes factor * top_k * tokens / experts of the tokens; None: all its tokens,
            dropless.
        eval_capacity_factor: The factor in evaluation; None: the same; infinite: dropless.
        min_capacity: The least capacity, in tokens.
        capacity_over: "rank": capacity counts the tokens of each rank separately; "all": those of all ranks together.
        drop: The tokens kept: "position": the first ones (all first choices before all second ones); "probability":
            those with the highest scores; "random".
        balance: The tokens of the load-balancing loss (Switch): "sequence" (independent of microbatches, ranks, stages
            and accumulation steps; rows that are no sequences use "global"), "microbatch" (this rank's tokens of one
            call), "global" (all ranks' tokens of one call) or "none".
        balance_weight: The weight of that loss.
        z_weight: The weight of the router's z-loss (ST-MoE).
        bias_rate: Balance without a loss: a bias added to scores, for choosing experts only, moves by this rate towards
            even load after each step (DeepSeek-V3).
        force_balanced: Whether tokens go round robin, for benchmarks.
        hidden: The features within the built-in MLP; None: in `expertize` experts are like the MLP.
        activation: The activation of the built-in MLP: a name or a function.
        gated: Whether one half of the features, activated, multiplies the other half.
        bias: Whether the built-in MLP has biases.
        shared: The number of shared experts, as one MLP applied to all tokens.
        copy: In `expertize`: whether all experts start as copies of the MLP.
        codec: The encoding of tokens between nodes, such as "bf16" or "fp8"; None: none.
        chunks: The number of chunks in which tokens are sent, each while experts compute the previous one.

    Raises:
        UsageError: For settings that are invalid or exclude each other.
    """

    count: int
    top_k: int = 2
    scores: Scores = "softmax"
    normalise: bool | None = None
    scale: float = 1.0
    groups: int = 1
    max_groups: int | None = None
    second: Second = "all"
    choice: Choice = "token"
    jitter: float = 0.0
    noise: float = 0.0
    capacity_factor: float | None = None
    eval_capacity_factor: float | None = None
    min_capacity: int = 4
    capacity_over: CapacityOver = "rank"
    drop: Drop = "position"
    balance: Balance = "sequence"
    balance_weight: float = 0.01
    z_weight: float = 0.0
    bias_rate: float = 0.0
    force_balanced: bool = False
    hidden: int | None = None
    activation: Any = "gelu"
    gated: bool = False
    bias: bool = True
    shared: int = 0
    copy: bool = False
    codec: Any = None
    chunks: int = 1

    def __post_init__(self) -> None:
        for name, words in _WORDS.items():
            if (value := getattr(self, name)) not in words:
                hint = suggest(value, words)
                raise UsageError(f"Experts: {name} is {value!r}, expected one of {', '.join(words)}{hint}")
        for name, least in (
            ("count", 1),
            ("top_k", 1),
            ("groups", 1),
            ("min_capacity", 0),
            ("shared", 0),
            ("chunks", 1),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UsageError(f"Experts: {name} is {value!r}, expected a whole number, at least {least}")
        for name in ("jitter", "noise", "balance_weight", "z_weight", "bias_rate"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"Experts: {name} is {getattr(self, name)}, expected a number of at least 0")
        for name in ("capacity_factor", "eval_capacity_factor"):
            factor = getattr(self, name)
            if factor is not None and not factor > 0:
                raise UsageError(f"Experts: {name} is {factor}, expected a positive number, or None")
        if not 0 < self.scale < math.inf:
            raise UsageError(f"Experts: scale is {self.scale}, expected a positive number")
        for name in ("force_balanced", "gated", "bias", "copy"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"Experts: {name} is {getattr(self, name)!r}, expected True or False")
        if not self.jitter < 1:
            raise UsageError(f"Experts: jitter is {self.jitter}, expected a number below 1")
        if isinstance(self.activation, type):
            kind = self.activation.__name__
            raise UsageError(f"Experts: activation is the class {kind}, expected a function, a name, or {kind}()")
        hidden = self.hidden
        if hidden is not None and (isinstance(hidden, bool) or not isinstance(hidden, Integral) or hidden < 1):
            raise UsageError(f"Experts: hidden is {hidden!r}, expected a whole number, at least 1, or None")
        self._check_groups()
        if self.second == "random" and self.top_k != 2:
            raise UsageError(f"Experts: second='random' is for top_k=2, got {self.top_k}")
        if self.choice == "expert":
            wrong = {"groups": self.groups > 1, "second": self.second != "all", "bias_rate": self.bias_rate > 0}
            wrong["force_balanced"] = self.force_balanced
            if bad := [name for name, given in wrong.items() if given]:
                raise UsageError(f"Experts: choice='expert' cannot be combined with {', '.join(bad)}")

    def _check_groups(self) -> None:
        if self.count % self.groups:
            raise UsageError(f"Experts: {self.count} experts cannot be split into {self.groups} equal groups")
        allowed = self.groups if self.max_groups is None else self.max_groups
        if not 1 <= allowed <= self.groups:
            raise UsageError(f"Experts: max_groups is {self.max_groups}, expected 1 to {self.groups} (groups)")
        reachable = allowed * (self.count // self.groups)
        if self.top_k > reachable:
            raise UsageError(f"Experts: top_k is {self.top_k}, but a token can reach at most {reachable} experts")

    @property
    def normalises(self) -> bool:
        """Whether the gates of a token add up to 1 (times `scale`)."""
        if self.normalise is not None:
            return self.normalise
        return self.top_k > 1 and self.choice == "token"

    @property
    def draws(self) -> bool:
        """Whether routing depends on a seed in training."""
        return self.noise > 0 or self.second == "random" or (self.drop == "random" and self.capacity_factor is not None)

    @property
    def has_losses(self) -> bool:
        """Whether the router has losses in training."""
        return (self.balance != "none" and self.balance_weight > 0) or self.z_weight > 0

    def mlp_features(self, times: int) -> int:
        """Return the features within the built-in MLP of so many experts. Raises UsageError if `hidden` is None."""
        if self.hidden is None:
            raise UsageError("MoE: pass Experts(hidden=...), the features within the built-in MLP, or expert=")
        return times * self.hidden

    def check_conversion(self, what: str, sharded: str = "") -> None:
        """Raise UsageError for settings that a dense MLP cannot become, or would ignore.

        Raises it also for an MLP that is sharded, if experts are to be like it. what: the MLP, for errors. sharded: the
        name of a sharded weight in it; "" if there is none.
        """
        if sharded and self.hidden is None:
            raise UsageError(
                f"{what}: {sharded} is sharded already, and experts are like a whole MLP: call expertize before "
                "parallelize, whose plan leaves the MLP out, or pass hidden= for built-in MLPs"
            )
        if self.shared and self.hidden is None:
            raise UsageError(f"{what}: shared experts are built-in MLPs: pass hidden=, their features")
        if self.copy and self.hidden is not None:
            raise UsageError(f"{what}: copies of a dense MLP have its size: pass copy=True or hidden=")
        if given := "" if self.hidden is not None else self._settings_of_mlp(_OF_MLP):
            raise UsageError(
                f"{what}: {given} is for built-in MLPs, but without hidden= experts are like this MLP, with its own "
                "activation and biases: pass hidden= too, or leave it out"
            )

    def check_custom(self, what: str) -> None:
        """Raise UsageError for settings of the built-in MLP that custom experts ignore. what: the layer, for errors."""
        if given := "" if self.shared else self._settings_of_mlp(("hidden", *_OF_MLP)):
            raise UsageError(
                f"{what}: {given} is for built-in MLPs, but expert= makes other experts, and there are no shared ones: "
                "leave it out, or leave expert= out"
            )

    def _settings_of_mlp(self, names: tuple[str, ...]) -> str:
        """Return those of some settings that differ from their defaults, for errors."""
        defaults = {one.name: one.default for one in fields(self)}
        given = {name: getattr(self, name) for name in names if getattr(self, name) != defaults[name]}
        return ", ".join(f"{name}={getattr(value, '__name__', repr(value))}" for name, value in given.items())

    def capacity(self, tokens: int, *, training: bool) -> int | None:
        """Return the maximum number of tokens, of `tokens` in all, that an expert takes; None: all."""
        factor = self.capacity_factor
        if not training and self.eval_capacity_factor is not None:
            factor = self.eval_capacity_factor
        if factor is None:
            if self.choice == "token":
                return None
            factor = 1.0
        even = factor * self.top_k * tokens / self.count
        wanted = math.ceil(even * (1 - _ROUNDING)) if math.isfinite(even) else tokens
        return min(tokens, max(wanted, self.min_capacity))
