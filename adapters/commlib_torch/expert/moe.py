"""MoE: a layer that sends each token to a few of many experts, which are distributed among ranks."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commlib.comparison.agreement import options_of
from commlib.errors import UsageError
from commlib.expert.chunked_dispatch import ChunkedDispatch, split_tokens
from commlib.expert.expert_ranks import ExpertRanks, MixtureRanks
from commlib.expert.experts import Experts
from commlib.expert.mixture import Mixture, stats_of
from commlib.expert.stats import ExpertStats
from commlib_torch._bridge import host_array, read, to_tensor
from commlib_torch._graph_breaks import disable_compile
from commlib_torch._shard_marks import MARK
from commlib_torch._shards import ShardedModule
from commlib_torch.expert._backward_failure import BackwardGuard
from commlib_torch.expert._chunks import run_in_chunks
from commlib_torch.expert._expert_stack import is_called_plainly, run_experts, stack_experts, use_seed
from commlib_torch.expert._family import Family
from commlib_torch.expert._functions import CombineFunction, DispatchFunction, RouteFunction
from commlib_torch.expert._pending_gradients import is_recomputing
from commlib_torch.expert._step_hooks import call_after_step, watch_steps
from commlib_torch.expert.losses import AuxiliaryLossModule
from commlib_torch.expert.mlp import MLP


class MoE(ShardedModule, AuxiliaryLossModule):
    """A mixture of experts: a router sends each token to a few experts, and sums their outputs.

    Called with (..., width), other tokens on each rank; a rank may have none. Returns the same shape.

    The values of parameters depend on rank 0's seed, not on the number of ranks. Those of experts are shards of stacks
    [experts, ...] in state dicts: see `gather_state_dict`. Add `auxiliary_loss(model)` to the loss; a pipeline does so
    by itself. The constructor and calls, forward and backward, are collective.

    Args:
        width: The features of inputs and outputs.
        experts: Their number, and the routing options.
        ranks: The ranks that share the experts, such as `mesh["ep"]`, or a mesh of any number of axes, for its axis ep
            or a part of dp.
        expert: A function that makes one, a module from (rows, width) to the same shape; None: the built-in MLP. If the
            module has a method `grouped(rows, counts)`, like `MLP`, this computes all experts of a rank at once.
        name: The name for errors and `stats`.
    """

    expert_bias: Tensor | None

    def __init__(
        self,
        width: int,
        experts: Experts,
        ranks: MixtureRanks,
        *,
        expert: Callable[[], nn.Module] | None = None,
        name: str = "MoE",
    ) -> None:
        super().__init__()
        expert_ranks = ExpertRanks.of(ranks, experts.count)
        self.width, self.options = width, experts
        # Before any other message: ranks with other experts would wait for each other, or mix messages.
        given = {"width": width, **options_of(experts), "expert": expert and "a module of its own", "name": name}
        self._agreement = expert_ranks.agree("MoE", name, {**given, "dtype": torch.get_default_dtype()})
        if expert is not None:
            experts.check_custom(name)
        self.mixture = Mixture(name, experts, expert_ranks)
        seed = expert_ranks.first(int(torch.randint(1 << 62, (), device="cpu")))
        make = expert or (lambda: self._mlp(1))
        with use_seed(seed):
            divided = self._mlp(1).divided() if expert is None and expert_ranks.tensor is not None else {}
        with use_seed(seed):
            self.router = nn.Linear(width, experts.count, bias=False)
            self.shared = self._mlp(experts.shared) if experts.shared else None
        self.experts = stack_experts(name, make, seed, self.mixture.placement, expert_ranks, divided)
        self._tensor = expert_ranks.tensor if divided else None
        self.family = Family()
        self._number = self.family.join(self)
        _living.add(self)
        self.register_load_state_dict_pre_hook(_become_copy)  # type: ignore[no-untyped-call]
        watch_steps()
        self.register_buffer("expert_bias", None)
        if experts.bias_rate:
            self.expert_bias = _exact(torch.zeros(experts.count))
            self.register_load_state_dict_post_hook(_keep_bias_exact)  # type: ignore[no-untyped-call]

    def _mlp(self, times: int) -> MLP:
        options = self.options
        return MLP(
            self.width,
            options.mlp_features(times),
            gated=options.gated,
            activation=options.activation,
            bias=options.bias,
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the outputs. mask: bool (...), False for padding, which is ignored and gets outputs of zeros."""
        if x.shape[-1] != self.width:
            raise UsageError(f"{self.mixture.name}: expected (..., {self.width}), got {tuple(x.shape)}")
        padding = None if mask is None else self._padding(x, mask)
        given = x if padding is None else x.masked_fill(padding, 0)  # a NaN would reach the router's weight gradient
        tokens = given.reshape(-1, self.width)
        y = self.mixed(tokens, mask, max(x.shape[-2], 1) if x.dim() > 2 else 0).reshape(x.shape)
        if self.shared is not None:
            shared = self.shared(given)
            y = y + (shared if padding is None else shared.masked_fill(padding, 0))
        return y

    def _padding(self, x: Tensor, mask: Tensor) -> Tensor:
        if mask.dtype != torch.bool or mask.shape != x.shape[:-1]:
            raise UsageError(
                f"{self.mixture.name}: a mask {mask.dtype}{list(mask.shape)} for {tuple(x.shape)}, expected "
                f"torch.bool{list(x.shape[:-1])}, False for padding"
            )
        return ~mask.to(x.device).unsqueeze(-1)

    @disable_compile
    def mixed(self, tokens: Tensor, mask: Tensor | None, sequence: int) -> Tensor:
        """Return the output of all experts except the shared ones."""
        options, mixture = self.options, self.mixture
        if not self._agreement.is_settled("first used"):
            used = {"dtype": tokens.dtype, "training": self.training, "sequences": "no" if sequence == 0 else "rows"}
            used |= {name: f"{one.dtype}{list(one.shape[1:])}" for name, one in self.experts.named_parameters()}
            self._agreement.settle("first used", used)
        mixture.renew_dispatcher()
        with mixture.reporting_errors():  # of a router of another class, or with hooks
            logits = self.logits(tokens)
        draws = self.training and options.draws
        if self.expert_bias is not None and self.training:
            call_after_step(next(self.router.parameters()), self._balance)
        routing = mixture.route(
            host_array(logits),
            training=self.training,
            seed=int(torch.randint(1 << 62, (), device="cpu")) if draws else 0,
            bias=None if self.expert_bias is None else host_array(self.expert_bias.float()),
            mask=None if mask is None else host_array(mask.reshape(-1)),
            sequence=sequence,
            again=is_recomputing(),
        )
        has_loss = self.training and options.has_losses
        waiting = self.recalled() if has_loss else None
        weights = (options.balance_weight, options.z_weight) if has_loss else (0.0, 0.0)
        gates, loss = RouteFunction.apply(logits, routing, weights, waiting)  # type: ignore[no-untyped-call]
        y = self._through_experts(tokens, routing, gates)
        if has_loss:  # a failed forward leaves none
            self.record_in_checkpoint(loss, waiting)
        return y

    def _through_experts(self, tokens: Tensor, routing: Any, gates: Tensor) -> Tensor:
        options, mixture = self.options, self.mixture
        between = BackwardGuard(mixture)
        if options.chunks > 1 and mixture.ranks.axis.size > 1:
            flow = ChunkedDispatch(mixture, split_tokens(routing, options.chunks), read(tokens), routing.gates)
            return run_in_chunks(flow, between, tokens, gates, self._computed)
        rows, row_gates, plan, counts = DispatchFunction.apply(  # type: ignore[no-untyped-call]
            tokens, gates, mixture.exchange, between, routing
        )
        out = self._computed(rows, counts)
        y: Tensor = CombineFunction.apply(  # type: ignore[no-untyped-call]
            out, row_gates, mixture.exchange, between, plan
        )
        return y

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._number = self.family.join(self, self._number)  # it is a copy
        _living.add(self)

    @property
    def _title(self) -> str:
        return self.mixture.name

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        before = self.expert_bias
        result = super()._apply(fn, recurse)
        after = self.expert_bias
        if before is not None and after is not None and _exact(after) is not after:
            self.expert_bias = _exact(before).to(after.device)
        return result

    @torch.no_grad()
    def _balance(self) -> None:
        """After a step, adjust the routing bias towards even load."""
        assert self.expert_bias is not None
        bias = host_array(self.expert_bias.float())
        self.expert_bias.copy_(to_tensor(self.mixture.rebalanced(bias)))

    def stats(self) -> ExpertStats:
        """Return the use of experts since the last call, by tokens of all ranks. Collective."""
        return self.mixture.stats()

    def _computed(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Run this rank's experts on their rows. Other ranks get its errors."""
        with self.mixture.reporting_errors():
            return self._run_experts(rows, counts)

    def _run_experts(self, rows: Tensor, counts: list[int]) -> Tensor:
        experts, name = self.experts, self.mixture.name
        grouped: Any = getattr(experts, "grouped", None)
        is_changed = isinstance(experts, MLP) and not experts.is_plain
        if is_changed and self._tensor is not None:
            raise UsageError(f"{name}: experts with tensor parallelism support neither hooks nor replaced layers")
        if grouped is None or is_changed:
            output = run_experts(name, experts, rows, counts)
        else:
            output = grouped(rows, counts) if self._tensor is None else grouped(rows, counts, self._tensor)
        if output.shape != rows.shape:
            raise UsageError(f"{name}: experts returned {tuple(output.shape)} for rows {tuple(rows.shape)}")
        return output

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the router's scores, always in float32."""
        jitter = self.options.jitter if self.training else 0.0
        with torch.autocast(tokens.device.type, enabled=False):
            x = tokens.float()
            if jitter:
                x = x * torch.empty_like(x).uniform_(1 - jitter, 1 + jitter)
            scores = self._scores(x)
        if scores.shape != (len(tokens), self.options.count):
            raise UsageError(
                f"{self.mixture.name}: the router returned {tuple(scores.shape)} for {len(tokens)} tokens, expected a "
                f"score for each of {self.options.count} experts"
            )
        return scores

    def _scores(self, x: Tensor) -> Tensor:
        """Run the router in float32, including its weights; a replaced router, or one with hooks, is called."""
        router: Any = self.router
        if type(router) is nn.Linear and router.bias is None and is_called_plainly(router):
            return F.linear(x, router.weight.float())
        exact = {name: one.float() for name, one in router.named_parameters() if one.is_floating_point()}
        scores: Tensor = torch.func.functional_call(router, exact, (x,))
        return scores

    def extra_repr(self) -> str:
        """Describe the number of experts and their ranks."""
        return f"{self.width}, {self.options.count} experts, {self.mixture.ranks.axis!r}"


_living: weakref.WeakSet[MoE] = weakref.WeakSet()


def _become_copy(layer: MoE, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Note that a layer becomes a copy of the one whose weights it is about to load.

    Warns of values that do not identify their experts.
    """
    name, own = next(layer.experts.named_parameters(), ("", None))
    given = state.get(f"{prefix}experts.{name}")
    if not isinstance(given, Tensor) or own is None or given.shape != own.shape or not given.data_ptr():
        return
    if layer.mixture.has_moved and not hasattr(given, MARK):
        warnings.warn(
            f"{layer.mixture.name}: {prefix}experts.{name} is loaded from a tensor that does not identify its "
            "experts, such as a clone, and experts have moved: it is right only if it was made since. Save "
            "gather_state_dict(model), or copy.deepcopy(model.state_dict())",
            stacklevel=2,
        )
    for other in list(_living):
        stack = next(other.experts.parameters(), None)
        if other is layer or stack is None or stack.data_ptr() != given.data_ptr():
            continue
        family = other.family
        if family is layer.family:
            family.relate(layer._number, other._number)
            return
        for one, number in family.merge(layer.family, layer._number, other._number).items():
            one.family, one._number = family, number
        return


def _exact(bias: Tensor) -> Tensor:
    """Return the routing bias in float32 or better: half precision would lose steps of 0.001."""
    return bias if bias.dtype in (torch.float32, torch.float64) else bias.float()


def _keep_bias_exact(layer: MoE, _: Any) -> None:
    if layer.expert_bias is not None:  # from the state dict, if it was assigned
        layer.expert_bias = _exact(layer.expert_bias)


def expert_stats(model: nn.Module) -> dict[str, ExpertStats]:
    """Return the use of the experts of a model's layers since the last call, by name, by tokens of all ranks.

    Collective, one small message. `commlib.expert.stats.draw_stats` draws them as bars.

    Args:
        model: A model with mixtures of experts.
    """
    return stats_of(module.mixture for module in model.modules() if isinstance(module, MoE))
