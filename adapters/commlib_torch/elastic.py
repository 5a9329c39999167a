"""Training state that is committed and restored in memory, as in `horovod.torch.elastic`.

    state = commlib_torch.elastic.TorchState(model=model, optimizer=optimizer, epoch=0)

    @commlib_torch.elastic.run
    def train(state): ...

The ranks of a job stay the same; the state is restored after a failed operation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Sampler

from commlib.horovod import sampler
from commlib.horovod.elastic import ObjectState, State, run, run_fn
from commlib.horovod.exceptions import HostsUpdatedInterrupt
from commlib.horovod.keepers import Keeper, SamplerKeeper, StateKeeper
from commlib_torch._autograd import backward_passes
from commlib_torch.broadcast import broadcast_optimizer_state, broadcast_parameters
from commlib_torch.expert.rebalance import owners_of, put_owners

__all__ = ["ElasticSampler", "HostsUpdatedInterrupt", "ObjectState", "State", "TorchState", "run", "run_fn"]


class ElasticSampler(sampler.ElasticSampler, Sampler[int]):
    __doc__ = sampler.ElasticSampler.__doc__


class TorchState(ObjectState):
    """Models, optimizers, schedulers, samplers and picklable values: the state from which a training loop continues.

    `model`, `optimizer` and every other argument become attributes. `commit()` keeps a copy in memory, `restore()` goes
    back to it, `sync()` gives all ranks the state of rank 0. `commit` and `sync` are collective: they join the
    processed sampler indices of all ranks.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(model=model, optimizer=optimizer, **kwargs)

    def keeper_of(self, value: Any) -> Keeper | None:
        """Return the keeper of a model, optimizer, sampler, scheduler or scaler; None for a picklable value."""
        if isinstance(value, torch.nn.Module):
            return _ModelKeeper(value)
        if isinstance(value, torch.optim.Optimizer):
            return _OptimizerKeeper(value)
        if isinstance(value, sampler.ElasticSampler):
            return SamplerKeeper(value)
        if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            return StateKeeper(value)
        if isinstance(value, torch.amp.GradScaler):
            return _ScalerKeeper(value)
        return None

    def between_passes(self) -> bool:
        """Return whether unreduced gradients have accumulated, including those outside of the state."""
        return any(member.holds_passes for member in backward_passes.members)


class _ModelKeeper(StateKeeper):
    def __init__(self, value: torch.nn.Module) -> None:
        super().__init__(value)
        self._owners = owners_of(value)

    def save(self) -> None:
        super().save()
        self._owners = owners_of(self.value)

    def restore(self) -> None:
        put_owners(self.value, self._owners)  # experts may have moved since
        super().restore()

    def give(self) -> None:
        broadcast_parameters(self.value.state_dict(), 0)


class _OptimizerKeeper(StateKeeper):
    def restore(self) -> None:
        super().restore()
        self.value.zero_grad()  # leftovers of a failed pass are not part of the committed state

    def give(self) -> None:
        broadcast_optimizer_state(self.value, 0)


class _ScalerKeeper(StateKeeper):
    def restore(self) -> None:
        super().restore()
        self.reset()

    def reset(self) -> None:
        # A failed step leaves a record of optimizers that it has unscaled or stepped since the last update, and
        # `load_state_dict` does not clear it. The next step's gradients would count as unscaled.
        self.value._per_optimizer_states.clear()
