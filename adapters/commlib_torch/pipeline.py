"""Pipeline: train a model whose stages are on the ranks of a group, a batch at a time, as one process would."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from commlib.communicator import Communicator
from commlib.errors import UsageError
from commlib.optim.clipping import (
    check_finite,
    check_limit,
    check_norm_type,
    clip_factor,
    largest_over_axes,
    norm_of_powers,
    sum_over_axes,
)
from commlib.pipeline.batch import shares, shares_in_updates
from commlib.pipeline.choice import check_batch_norm, check_example, choose_stages
from commlib.pipeline.losses import Details, Weigh, Weigher
from commlib.pipeline.pipe import AnySchedule, Codecs, Pipe
from commlib.pipeline.recompute import Checkpoint, Recompute
from commlib.pipeline.rows import Rows, rows_option
from commlib.pipeline.schedule import Kind
from commlib.pipeline.schedule.auto import LayerCosts
from commlib_torch._autograd import backward_passes
from commlib_torch._batch_statistics import WholeBatchStatistics
from commlib_torch._batches import arguments, cut_by_rows, cut_by_user, together
from commlib_torch._bridge import array_of
from commlib_torch._constructors import are_constructors, build, outline
from commlib_torch._containers import is_container
from commlib_torch._copies import copy_of
from commlib_torch._first_batch import FirstBatch
from commlib_torch._hooks import registrations
from commlib_torch._loss_module import NAME as LOSS
from commlib_torch._loss_module import UsedParameters, loss_module
from commlib_torch._losses import Loss, LossWeights
from commlib_torch._measured import layer_costs
from commlib_torch._optimizer_state import merged
from commlib_torch._parts import INPUTS, Cut, Layers, Split, Units, counts_by
from commlib_torch._recompute import recompute_in
from commlib_torch._shared_buffers import SharedBuffers
from commlib_torch._signature import described
from commlib_torch._staged import Staged
from commlib_torch._stages import Batch, StashedWeights, TorchStage, TorchTensors, in_mode
from commlib_torch._tied import TiedWeights
from commlib_torch._traced import Traced
from commlib_torch._verify import check_with_example, given, verify_cut
from commlib_torch.clip import powers_by_axis
from commlib_torch.devices import in_order
from commlib_torch.expert.losses import keepers_in
from commlib_torch.tensor.checking import check_stages
from commlib_torch.tensor.state import gather_optimizer_state, gather_state_dict, load_optimizer_state


def pipeline(
    model: Any,
    comm: Communicator,
    *,
    schedule: AnySchedule = "1f1b",
    microbatches: int,
    loss: Loss | None = None,
    split: Split = "auto",
    stages: int | None = None,
    checkpoint: Checkpoint = "none",
    batch_norm: str = "microbatch",
    codec: Codecs = None,
    weigh: Weigh = None,
    rows: Mapping[str, Any] | None = None,
    optimizer: Callable[[Sequence[tuple[str, nn.Parameter]]], torch.optim.Optimizer] | None = None,
    every: int | None = None,
    example: Any = None,
    memory: int | None = None,
    verify: Any = None,
) -> Pipeline:
    """Put the stages of a model on the ranks of `comm`, such as `mesh["pp"]`. The same call on every rank; collective.

        pipe = ct.pipeline(model, mesh["pp"], schedule="1f1b", microbatches=8, loss=loss_fn)
        optimizer = torch.optim.AdamW(pipe.parameters())
        loss = pipe.step(x, y); optimizer.step(); optimizer.zero_grad()

    model: an nn.Sequential, a list of modules (a tuple that one of them returns is several arguments of the next) or of
    functions that return one each, of which a rank calls those of its stages, or any module that torch.fx can trace;
    this rank keeps its stages, under the names that they have in the model.
    Submodules that do what a trace cannot keep are not cut inside. schedule: a name ("gpipe", "1f1b", "interleaved",
    "zb_h1", "zb_v", "dualpipev", "breadth_first", "pipedream", "pipedream_2bw"), the path of a CSV file, or a Schedule.
    microbatches: into how many parts a batch is cut, along the first dimension. loss: of (output, target).
    split: "auto" (even parameter bytes), "time" (even time, as measured), or how many layers each stage has, or the
    names of the submodules with which the later stages begin, or a function of the model that returns one of these.
    stages: in all, where a rank has several.
    schedule="auto" chooses by simulated time, from what each layer is measured to cost, with at most `memory` bytes of
    activations on a rank: `pipe.why` says why. Both need example=, an x of as many rows as a microbatch has, on rank 0.
    So does the check of a plan, where `parallelize` has divided the model and was given no example; and a model that
    asks which of its arguments are there, or for the value of a number: it is cut for those of the example. Where there
    is an example, rank 0 compares outputs, gradients and buffers of the stages with those of the whole model, in both
    modes. verify: a batch, the arguments of `step`, as (x, y), whole and the same on every rank: all ranks compare so,
    and a step of the pipeline in evaluation mode with one of the whole model. Both run copies of the model, without the
    hooks that users have put on it; nothing of it changes.
    checkpoint: what is kept of activations between forward and backward: "none" recomputed, "selective" (products are
    kept) or "full" (only a stage's inputs are); or these by patterns of layers' names, {"blocks.*": "full"}, or a
    function of a layer's name and the layer that returns one: each is then computed again for itself, with all that is
    within it, and is not cut. batch_norm: "microbatch" updates running statistics with each
    microbatch, "batch" once with those of the whole batch.
    codec: how activations and their gradients travel, such as "bf16" or "int8"; or a mapping by the stages between
    which they do: {(0, 1): "bf16", (1, 0): "int8"}. weigh: how
    many terms a microbatch's loss is the mean of, where torch's own losses do not say it: a function of its target and,
    if it takes them, `inputs`; or "rows", or "sum" of a loss that is a sum.
    rows: in which dimension of x, y and output they are, if not in the first: see `commlib.pipeline.rows`; such as
    {"x": (0, "whole"), "output": 1}.
    optimizer: makes the optimizer of named parameters, for schedules that update weights themselves; every:
    microbatches between their updates.

    Raises UsageError for what makes no sense on this rank, or on all ranks if a check finds that anything differs,
    MismatchError on all ranks if they ask for different things, ScheduleError for a schedule that cannot run.
    """
    check_batch_norm(batch_norm)
    constructors = model if are_constructors(model) else ()
    if constructors:
        if verify is not None or example is not None or schedule == "auto" or split == "time":
            raise UsageError(
                "pipeline: no rank builds all layers of a list of constructors, so nothing can be measured or "
                "compared: leave out verify= and example=, and say schedule= and split="
            )
        model = outline(constructors)
    recompute = recompute_in(model if isinstance(model, nn.Module) else _layers_of(model), checkpoint)
    x = given(verify)[0] if example is None and verify is not None else example
    told = comm.broadcast_object(None if x is None else described(arguments(x)))
    units = _units(model, comm.size, told, recompute)
    chosen = choose_stages(
        comm, schedule, microbatches, split=split(model) if callable(split) else split, stages=stages, every=every,
        memory=memory, measure=lambda: _measured(units, example, recompute), count=partial(counts_by, units),
    )  # fmt: skip
    check_stages(
        comm, model, lambda: copy_of(units.cut([len(units.sizes())]).parts[0]),
        None if example is None else (({INPUTS: arguments(example)},), {}), calls_layers=isinstance(units, Layers),
    )  # fmt: skip
    pieces = units.cut(chosen.counts)
    spreads = not isinstance(model, nn.Sequential)
    if verify is not None:
        verify_cut(
            comm, model, pieces, verify, loss=loss, updates=bool(chosen.schedule.every), spreads=spreads,
            make=lambda cut, loss: Pipeline(
                comm, cut, chosen.schedule, loss=loss, recompute=recompute, codec=None, weigh=weigh,
                rows=rows_option(rows), optimizer=None,
            ),
        )  # fmt: skip
    elif told is not None:
        check_with_example(comm, model, pieces, example, spreads=spreads)
    if constructors:
        build(constructors, pieces, chosen.schedule.stages_of(comm.rank), comm.broadcast_object(torch.initial_seed()))
    pipe = Pipeline(
        comm,
        pieces,
        chosen.schedule,
        loss=loss,
        recompute=recompute,
        codec=codec,
        weigh=weigh,
        rows=rows_option(rows),
        is_outline=bool(constructors),
        optimizer=optimizer,
    )
    if batch_norm == "batch":
        pipe.statistics = WholeBatchStatistics(list(pipe.parts))
    pipe.why = chosen.why
    if isinstance(units, Traced) and told is None:
        pipe.compare_first_batch(model, pieces)
    return pipe


def _units(model: Any, ranks: int, example: Any, recompute: Recompute) -> Units:
    """Return a model as a sequence of units. example: as `described`. Raises UsageError for what is none."""
    if not isinstance(model, nn.Module):
        return Layers(((str(number), layer) for number, layer in enumerate(model)), spreads=True)
    if is_container(model):
        # named_children() leaves out a layer that comes again
        layers = [(name, layer) for name, layer in model._modules.items() if layer is not None]
        return Layers(layers, spreads=isinstance(model, nn.ModuleList), container=model)
    return Traced(model, ranks, example, () if isinstance(recompute, str) else recompute)


def _layers_of(model: Any) -> Sequence[nn.Module]:
    """Return a list of layers. Raises UsageError if it is none."""
    if not isinstance(model, list | tuple) or not all(isinstance(layer, nn.Module) for layer in model):
        kinds = sorted({type(layer).__name__ for layer in model}) if isinstance(model, list | tuple) else []
        got = f"a list of {', '.join(kinds)}" if kinds else type(model).__name__
        raise UsageError(f"pipeline: expected an nn.Module or a list of them, got {got}")
    return model


def _measured(units: Units, example: Any, recompute: Recompute) -> LayerCosts:
    """Return what each unit costs here."""
    costs = layer_costs(units.cut([1] * len(units.sizes())), arguments(check_example(example)))
    return replace(costs, keeps_inputs=recompute == "full")


class Pipeline(Staged):
    """This rank's stages of a model. Made by `pipeline`.

    It has the parameters and buffers of its stages, under the names of the whole model; on the rank of the last stage
    also those of a loss that has parameters, as `loss.NAME`.
    """

    def __init__(
        self,
        comm: Communicator,
        pieces: Cut,
        schedule: Any,
        *,
        loss: Loss | None,
        recompute: Recompute,
        codec: Codecs,
        weigh: Weigh,
        rows: Rows,
        is_outline: bool = False,
        optimizer: Callable[[Sequence[tuple[str, nn.Parameter]]], torch.optim.Optimizer] | None,
    ) -> None:
        own = schedule.stages_of(comm.rank)
        last = schedule.stages - 1
        module = loss_module(loss, pieces.parts)
        names = {name for part in pieces.parts for name in part.state_dict()}
        names |= {f"{LOSS}.{name}" for name in (module.state_dict() if module is not None else ())}
        super().__init__({stage: pieces.parts[stage] for stage in own}, names, module if last in own else None)
        # The last stage is one with the loss, for all that concerns weights.
        parts = [*pieces.parts[:-1], Staged({last: pieces.parts[-1]}, names, module)]
        self._placeholder = (
            nn.Parameter(torch.empty(0), requires_grad=False),
        )  # in a tuple: it is none of the model's
        self.why = ""
        """Why this schedule was chosen, if it was."""
        self.statistics: WholeBatchStatistics | None = None
        """What makes running statistics those of whole batches, if that was asked for."""
        self._waits = False
        """Whether the first batch is still to be compared with what the whole model makes of it."""
        self._first_batch: FirstBatch | None = None
        self._where = rows
        self._losses = LossWeights(loss, Weigher(weigh), rows)
        tied = TiedWeights.found(comm, parts, schedule.placement)
        if schedule.every and module is not None:
            raise UsageError(
                f"pipeline: the loss has parameters, but schedule {schedule.name} updates each stage by itself: use "
                "another schedule"
            )
        if schedule.every and tied.exist:
            raise UsageError(
                f"pipeline: stages on several ranks share a weight, but schedule {schedule.name} updates each stage by "
                "itself, before the gradients of all are there: use another schedule"
            )
        self._tied = tied
        self._shared_buffers = SharedBuffers(parts, schedule.placement, comm.rank)
        self._names = _names_by_name(parts)
        self._splits = any(action.kind is Kind.I for program in schedule.programs for action in program)
        self._stages: dict[int, TorchStage] = {}
        for stage in own:
            part = pieces.parts[stage]
            takes = {link.source: names for link, names in pieces.values.items() if link.target == stage}
            gives = {link.target: names for link, names in pieces.values.items() if link.source == stage}
            self._stages[stage] = TorchStage(
                part, takes, gives, is_first=stage == 0, is_last=stage == last, loss=self._losses, recompute=recompute
            )
        lines = [f"split {pieces.counts}", f"codec {codec}", f"checkpoint {recompute}", str(rows)]
        for stage, part in enumerate(parts):
            lines += [
                f"stage {stage}: {name} {tuple(p.shape)} {p.dtype}{' on meta' if p.is_meta and not is_outline else ''}"
                for name, p in part.named_parameters()
            ]
        self._tensors = TorchTensors(self._first())
        self._was_meta = not is_outline and any(p.is_meta for part in parts for p in part.parameters())
        self._pipe = Pipe(
            comm,
            schedule,
            pieces.links,
            self._stages,
            self._tensors,
            codec=codec,
            lines=lines,
        )
        if last in own and not schedule.every:
            of_others = {id(p): name for part in parts for name, p in part.named_parameters()}
            self._stages[last].used = UsedParameters(self.parameters, of_others, comm.rank)
        self._has_extras = any(keepers_in(part) for part in pieces.parts)
        self._order_shared()
        tied.spread()
        self._optimizer: torch.optim.Optimizer | None = None
        if schedule.every:
            self._update_by(optimizer)
        elif optimizer is not None:
            raise UsageError(f"pipeline: schedule {schedule.name} leaves updates to you: it takes no optimizer=")

    def _order_shared(self) -> None:
        """Let weights that several stages of this rank share be complete with the last of these."""
        done = self._pipe.runner.last_gradients
        seen: set[int] = set()
        for stage in sorted(self._stages, key=lambda number: done.get(number, -1), reverse=True):
            own = {id(parameter) for parameter in self._stages[stage].part.parameters()}
            self._stages[stage].later = frozenset(own & seen)
            seen |= own

    def _update_by(self, make: Callable[[Any], torch.optim.Optimizer] | None) -> None:
        if make is None:
            raise UsageError(
                f"pipeline: schedule {self._pipe.schedule.name} updates weights while it runs: give optimizer=, which "
                "makes the optimizer of named parameters, such as lambda named: torch.optim.SGD([p for _, p in named])"
            )
        for stage in self._stages.values():
            if named := list(stage.part.named_parameters()):
                stage.weights = StashedWeights(stage.part, make(named))

    # What users call

    def step(
        self,
        x: Any = None,
        y: Any = None,
        *,
        scale: float = 1.0,
        cut: bool = True,
        details: bool = False,
        outputs: bool = False,
    ) -> Any:
        """Run forward and backward on a batch; return its loss, a tensor, on every rank. Collective.

            loss = pipe.step(x, y)
            loss, losses, metrics, outputs = pipe.step(x, y, outputs=True)
            loss = pipe.step([x1, x2], [y1, y2], cut=False)

        Losses that layers have of their own, such as those of routers, are part of it. Raises UsageError on all ranks
        where the losses of microbatches do not come to that of the batch; gradients have been added then.
        Gradients are added to those that are there, as one process would with the whole batch. x: a tensor, a tuple of
        arguments or a dict of named ones, needed on the rank of the first stage; y: needed on that of the last. scale:
        what gradients, but not the loss, are multiplied by. cut: False if x and y are lists of at most as many
        microbatches as the schedule has, each of its own shapes. details, outputs: return `Details`, with the batch's
        outputs if they are asked for.
        """
        options = {"scale": scale, "cut": cut, "keeps_outputs": outputs}
        with self._batch_of(x, y, is_training=True, **options) as empty:
            comm = self._pipe.comm
            self._tied.begin(comm)
            whole = nullcontext() if self.statistics is None else self.statistics.step()
            counting = registrations.counting() if self._splits else nullcontext()
            with (
                counting,
                self._shared_buffers.unchanged(),
                whole,
                self._tied.apart(),
                backward_passes.as_one(),
                in_order(),
            ):
                self._pipe.train(empty)
            self._tied.add_up(comm)
            loss = self._loss()
            return self._details(loss) if details or outputs else loss

    def evaluate(
        self, x: Any = None, y: Any = None, *, cut: bool = True, details: bool = False, outputs: bool = False
    ) -> Any:
        """Return the loss of a batch in evaluation mode, on every rank. Arguments as those of `step`. Collective."""
        options = {"cut": cut, "keeps_outputs": outputs}
        with in_mode(list(self.children()), training=False), self._batch_of(x, y, **options) as empty:
            with in_order():
                self._pipe.forward(empty)
            loss = self._loss()
            return self._details(loss) if details or outputs else loss

    def predict(self, x: Any = None, *, cut: bool = True) -> Any:
        """Return what the model gives for a batch in evaluation mode, on every rank. Collective.

        Raises UsageError for an output whose rows are not where `rows` of `pipeline` says.
        """
        with (
            in_mode(list(self.children()), training=False),
            self._batch_of(x, None, cut=cut, wants_outputs=True) as empty,
        ):
            with in_order():
                self._pipe.forward(empty)
            return self._outputs()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to be called: a batch goes through all ranks."""
        raise UsageError("a pipeline is not called: use step(x, y), evaluate(x, y) or predict(x), on every rank")

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
        """Scale gradients so that the norm of those of all stages is `max_norm` at most; return what it was.

        norm_type: 2, any number above 0, or inf, as of torch.nn.utils.clip_grad_norm_. A weight that several stages
        share counts once. The same bits on all ranks. Collective. Raises UsageError on all ranks for a norm that is
        infinite or NaN, if that is an error; else it scales by 0 or NaN.
        """
        limit = check_limit("clip_grad_norm", "max_norm", max_norm)
        norm_type = check_norm_type("clip_grad_norm", norm_type)
        counted = [parameter for parameter in self.parameters() if not self._tied.is_counted_elsewhere(parameter)]
        over_axes = largest_over_axes if norm_type == math.inf else sum_over_axes
        powers = over_axes(powers_by_axis(counted, norm_type))
        is_double = any(one.grad is not None and one.grad.dtype == torch.float64 for one in self.parameters())
        told = self._pipe.comm.all_gather_object((powers, is_double))
        norm = norm_of_powers([own for own, _ in told], norm_type)
        if error_if_nonfinite:
            check_finite("clip_grad_norm", norm)
        factor = clip_factor(norm, limit, epsilon=1e-6)
        if factor != 1:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        return torch.tensor(norm, dtype=torch.float64 if any(double for _, double in told) else torch.float32)

    def picture(self, *, width: int | None = None) -> str:
        """Draw the schedule. Not collective."""
        return self._pipe.picture(width=width)

    def gather_state_dict(self) -> dict[str, Tensor]:
        """Return the state of the whole model, on every rank. Collective."""
        states = self._pipe.comm.all_gather_object(gather_state_dict(self))
        return {name: value for state in states for name, value in state.items()}

    def gather_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the state of the optimizers of all ranks, by the names of the whole model, on every rank. Collective.

        `load_optimizer_state` takes it on any number of stages.
        """
        own = gather_optimizer_state(optimizer, self._by_all_names())
        return merged(self._pipe.comm.all_gather_object(own))

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Load what is this rank's of a state that `gather_optimizer_state` returned. Not collective.

        Each parameter has the settings (learning rate, weight decay, ...) that it had. Raises UsageError if the state
        lacks a parameter, or if those of one group had different settings.
        """
        load_optimizer_state(optimizer, self._by_all_names(), state)

    def close(self) -> None:
        """End this rank's part. The others are told."""
        self._first_batch = None
        self._pipe.close()

    @property
    def pipe(self) -> Pipe:
        """What runs the schedule."""
        return self._pipe

    # The rest

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the parameters of this rank's stages; an empty one where they have none, as torch's optimizers want."""
        none = True
        for _, parameter in self.named_parameters(recurse=recurse):
            none = False
            yield parameter
        if none:
            yield self._placeholder[0]

    def _refuse_meta(self) -> None:
        """Raise UsageError, on all ranks, if weights are on the meta device still."""
        found = [name for name, parameter in self.named_parameters() if parameter.is_meta]
        if first := next((name for names in self._pipe.comm.all_gather_object(found[:1]) for name in names), ""):
            raise UsageError(
                f"pipeline: {first} is on device meta: call to_empty(device=...) and load_state_dict, or "
                "load_state_dict(..., assign=True), on all ranks before the first batch"
            )
        self._was_meta = False

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        found = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._order_shared()  # parameters may be others now
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load what is this rank's of a state of the whole model. Not collective."""
        found = super().load_state_dict(state_dict, strict, assign)
        self._order_shared()
        return found

    def _first(self) -> nn.Parameter | None:
        return next((parameter for _, parameter in self.named_parameters()), None)

    def _by_all_names(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters, under each name that one has anywhere in the whole model."""
        for name, parameter in self.named_parameters(remove_duplicate=False):
            for other in self._names.get(name, [name]):
                yield other, parameter

    @contextmanager
    def _batch_of(self, x: Any, y: Any, **options: Any) -> Iterator[set[int]]:
        """Run a batch within. What goes wrong on a rank is told to all, and nothing of it is left."""
        was_meta = self._was_meta
        if was_meta:  # ranks agree anew on where values go
            self._tensors.find(self._first())
            self._pipe.meet_anew()
        with self._pipe.together():
            try:
                if was_meta:
                    self._refuse_meta()
                empty = self._begin(x, y, **options)
                is_compared = self._waits and self._compare_first_batch()
                yield empty
                if is_compared:  # after a batch that fails, on all ranks, the next one is the first
                    if self._first_batch is not None:
                        self._first_batch.warn()
                    self._waits, self._first_batch = False, None
            finally:
                for stage in self._stages.values():
                    stage.clear()
                self._batch = Batch()

    def compare_first_batch(self, model: nn.Module, pieces: Cut) -> None:
        """Compare the first batch with what the whole model makes of it, which is kept until then."""
        self._waits = True
        if self._pipe.comm.rank == self._pipe.first:
            self._first_batch = FirstBatch(model, pieces, list(self._stages))

    def _compare_first_batch(self) -> bool:
        """Return whether there was anything to compare. Raises UsageError on all ranks for a difference. Collective."""
        pipe, fault = self._pipe, ""
        call = next((one for one, count in zip(self._batch.inputs, self._counts, strict=False) if count), None)
        if self._first_batch is not None and call is not None:
            fault = self._first_batch.fault(call)
        has_any, fault = pipe.comm.all_gather_object((call is not None, fault))[pipe.first]
        if fault:
            pipe.refuse(fault)
        return bool(has_any)

    def _begin(
        self,
        x: Any,
        y: Any,
        *,
        is_training: bool = False,
        wants_outputs: bool = False,
        keeps_outputs: bool = False,
        scale: float = 1.0,
        cut: bool = True,
    ) -> set[int]:
        """Cut the batch; return which microbatches are empty, on the first stage's rank."""
        schedule, rank = self._pipe.schedule, self._pipe.comm.rank
        batch = Batch(is_training=is_training, wants_outputs=wants_outputs, keeps_outputs=keeps_outputs, scale=scale)
        parted = partial(cut_by_rows if cut else cut_by_user, microbatches=schedule.microbatches)
        empty: set[int] = set()
        rows: list[int] = []
        if rank == self._pipe.first:
            if x is None:
                raise UsageError(f"pipeline: rank {rank} has the first stage: give it x")
            parts, rows = parted(x, what="x", where=self._where.x)
            batch.inputs = [arguments(part) for part in parts]
            empty = {number for number, count in enumerate(rows) if not count}
            if wants_outputs and len(empty) == len(rows):
                empty.discard(0)  # outputs of no rows have a shape, too
        if rank == self._pipe.last and not wants_outputs:
            if y is None and x is None:
                raise UsageError(f"pipeline: rank {rank} has the last stage: give it y, or x where the loss needs no y")
            inputs, of_x = parted(x, what="x", where=self._where.x) if x is not None else ((), [])
            targets, of_y = parted(y, what="y", where=self._where.y) if y is not None else ([None] * len(of_x), of_x)
            if of_x and of_x != of_y:
                raise UsageError(f"pipeline: x has {sum(of_x)} rows, and y {sum(of_y)}: give those of one batch")
            rows = of_y
            batch.losses = self._losses.begin(rows, targets, inputs, schedule.every)
        self._rows = sum(rows) if rows else -1
        self._counts = rows
        if self._has_extras and is_training:
            batch.rows = self._pipe.tell_rows(rows)
            batch.row_shares = shares_in_updates(batch.rows, schedule.every)
        for stage in self._stages.values():
            stage.batch = batch
            if stage.weights is not None:
                stage.weights.begin()
        self._batch = batch
        return empty

    def _loss(self) -> Tensor:
        """Return the loss of the batch, which the last stage has, on all ranks. Raises UsageError if it is none."""
        batch, pipe = self._batch, self._pipe
        total, dtype, fault = 0.0, torch.float32, ""
        if batch.losses is not None:
            values = batch.losses.values
            total = batch.losses.mean({number: float(loss) for number, loss in values.items()})
            dtype = next((loss.dtype for loss in values.values()), dtype)
            fault = self._losses.fault(batch.losses)
        weights = shares(batch.rows)
        extra = sum(loss * weights[number] for number, loss in sorted(batch.extras.items()))
        numbers = [total, float(dtype is torch.float64), float(bool(fault))]
        told, is_double, is_wrong = pipe.tell(numbers, rows=self._rows, added=extra)
        if is_wrong:
            pipe.refuse(pipe.comm.broadcast_object(fault, pipe.last))
        return torch.tensor(told, dtype=torch.float64 if is_double else torch.float32)

    def _details(self, loss: Tensor) -> Details:
        """Return what is known of the batch beside its loss. Collective."""
        batch, comm, last = self._batch, self._pipe.comm, self._pipe.last
        found: tuple[list[float], dict[str, Any]] = [], {}
        if batch.losses is not None:
            own, metrics = batch.losses, batch.losses.metrics
            found = [float(own.values.get(number, math.nan)) for number in range(len(own.rows))], {}
            for name in next(iter(metrics.values()), {}):
                found[1][name] = own.mean({number: values[name] for number, values in metrics.items()})
        outputs = None
        if batch.keeps_outputs and comm.rank == last:
            outputs = self._together(self._counts)
        losses, averages = comm.broadcast_object(pytree.tree_map_only(Tensor, Tensor.cpu, found), last)
        return Details(loss, losses, averages, outputs)

    def _together(self, rows: Sequence[int]) -> Any:
        """Return the outputs of all microbatches as those of the batch, where the last stage is."""
        outputs = self._batch.outputs
        return together([outputs[n] for n in sorted(outputs)], [rows[n] for n in sorted(outputs)], self._where.output)

    def _outputs(self) -> Any:
        comm, last = self._pipe.comm, self._pipe.last
        rows = self._pipe.tell_rows(self._counts)
        whole = self._together(rows) if comm.rank == last else None
        leaves, spec = pytree.tree_flatten(pytree.tree_map_only(Tensor, Tensor.cpu, whole))
        # Of a tensor its shape and dtype; None, a number or a string itself.
        kinds = [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]
        kinds, shape = comm.broadcast_object((kinds, pytree.treespec_dumps(spec)), last)
        if comm.rank != last:
            leaves = [torch.empty(kind[0], dtype=kind[1]) if len(kind) == 2 else kind[0] for kind in kinds]
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                comm.broadcast(array_of(leaf), last)
        return pytree.tree_unflatten(leaves, pytree.treespec_loads(shape))


def _names_by_name(parts: Sequence[nn.Module]) -> dict[str, list[str]]:
    """Return, by each name of a parameter, all that it has in any stage."""
    names: dict[int, dict[str, None]] = {}
    for part in parts:
        for name, parameter in part.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), {})[name] = None
    return {name: list(own) for own in names.values() for name in own}
