"""Pipeline: train a model with its stages on the ranks of a group, one batch at a time, with one process's results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from commlib.communicator import Communicator
from commlib.comparison.agreement import describe
from commlib.errors import UsageError
from commlib.literals import BatchNormMode
from commlib.optim.clipping import (
    check_finite,
    check_limit,
    check_norm_type,
    clip_factor,
    norm_of_powers,
    power_over_axes,
)
from commlib.pipeline.choice import check_batch_norm, choose_stages
from commlib.pipeline.losses import Weigh, Weigher
from commlib.pipeline.pipe import AnySchedule, Codecs, Pipe, Split
from commlib.pipeline.recompute import Checkpoint, Recompute
from commlib.pipeline.rows import Rows, rows_option
from commlib.pipeline.schedule import Weights
from commlib.ranks import Ranks, communicator_of
from commlib.sharding.shards import world_ranks
from commlib_torch._copies import copy_of
from commlib_torch._graph_breaks import disable_compile
from commlib_torch._optimizer_state import merge_states
from commlib_torch._readiness import check_loss, check_ready
from commlib_torch._scaled_steps import check_scaler, scaler_of_step
from commlib_torch._signature import describe_arguments
from commlib_torch._stage_norms import note_stages
from commlib_torch._step_checks import before_steps
from commlib_torch.clip import powers_by_axis
from commlib_torch.expert.losses import keepers_in
from commlib_torch.pipelines._batch_statistics import WholeBatchStatistics
from commlib_torch.pipelines._batches import arguments
from commlib_torch.pipelines._first_comparison import FirstComparison
from commlib_torch.pipelines._loading import Loading
from commlib_torch.pipelines._loss_module import NAME as LOSS
from commlib_torch.pipelines._loss_module import loss_module
from commlib_torch.pipelines._losses import Loss, LossWeights
from commlib_torch.pipelines._model_layers import ModelLayers
from commlib_torch.pipelines._options import options_of_loss, options_of_stages
from commlib_torch.pipelines._own_stages import (
    MakeOptimizer,
    check_updates,
    give_optimizers,
    lines_of,
    look_at_weights,
    names_by_name,
    order_shared,
    stages_of,
)
from commlib_torch.pipelines._parts import INPUTS, Layers, SplitModel, compute_counts
from commlib_torch.pipelines._recompute import resolve_recompute
from commlib_torch.pipelines._shared_buffers import SharedBuffers
from commlib_torch.pipelines._shared_objects import SharedObjects
from commlib_torch.pipelines._stage_module import StageModule
from commlib_torch.pipelines._stages import TorchTensors
from commlib_torch.pipelines._steps import StepRunner
from commlib_torch.pipelines._sync_batch_norms import check_batch_norms
from commlib_torch.pipelines._tied_weights import TiedWeights
from commlib_torch.pipelines._traced_model import TracedModel
from commlib_torch.pipelines._units import are_constructors, build, costs_of, layers_of, outline, units_of
from commlib_torch.pipelines._verify import check_tensors, check_with_example, unpack_batch, verify_cut
from commlib_torch.tensor._norms import watch_norms
from commlib_torch.tensor.plan_check import check_stages
from commlib_torch.tensor.state import gather_optimizer_state, gather_shards, load_optimizer_state


def pipeline(
    model: Any,
    ranks: Ranks,
    *,
    schedule: AnySchedule = "1f1b",
    microbatches: int,
    loss: Loss | None = None,
    split: Split = "auto",
    stages: int | None = None,
    checkpoint: Checkpoint = "none",
    batch_norm: BatchNormMode = "microbatch",
    codec: Codecs = None,
    weigh: Weigh = None,
    rows: Mapping[str, Any] | None = None,
    optimizer: MakeOptimizer | None = None,
    every: int | None = None,
    example: Any = None,
    memory: int | None = None,
    verify: Any = None,
) -> Pipeline:
    """Put the stages of a model on `ranks`, such as `mesh["pp"]`. Collective, with equal arguments.

        pipe = ct.pipeline(model, mesh["pp"], schedule="1f1b", microbatches=8, loss=loss_fn)
        optimizer = torch.optim.AdamW(pipe.parameters())
        loss = pipe.step(x, y); optimizer.step(); optimizer.zero_grad()

    Comparisons run copies of the model without the user's hooks, and change nothing in it.

    Args:
        model: An nn.Sequential; a list of modules (a tuple returned by one becomes the arguments of the next); a list
            of functions that return one module each (a rank calls those of its stages); or any module that
            torch.fx can trace. This rank keeps its stages, under their names in the model. A submodule that a trace
            cannot represent is kept in one stage.
        ranks: The ranks of the stages, such as `mesh["pp"]`.
        schedule: A name ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v", "dualpipev", "breadth_first", "pipedream",
            "pipedream_2bw"), the path of a CSV file, or a Schedule; "auto" chooses by simulated time, from the measured
            cost of each layer: `pipe.why` explains the choice.
        microbatches: The number of microbatches of a batch, cut along the first dimension.
        loss: A function of (output, target); None: none, for `predict` and for a last stage that returns its loss.
        split: "auto" (even parameter bytes), "time" (even measured time), the number of layers of each stage, the names
            of the submodules with which the later stages begin, or a function of the model that returns one of these.
        stages: The total number of stages, if a rank has several; None: from the schedule.
        checkpoint: The activations that are recomputed in the backward: "none", "selective" (all but the results of
            products) or "full" (all but a stage's inputs). Or a mapping of these by patterns of layer names,
            {"blocks.*": "full"}, or a function of a layer's name and the layer that returns one: each of these layers
            is recomputed separately, with its sublayers, and stays in one stage.
        batch_norm: "microbatch" updates running statistics with each microbatch, "batch" once with those of the whole
            batch.
        codec: The compression of activations and their gradients, such as "bf16" or "int8"; or a mapping by link: {(0,
            1): "bf16", (1, 0): "int8"}; None: none.
        weigh: The number of terms in a microbatch's mean loss, needed unless the loss is one of torch's: a function of
            its target and, if it accepts them, `inputs`; or "rows"; or "sum" for a loss that is a sum; or, for a loss
            that returns a dict of its summands, a dict of these: {"words": lambda y: (y != -100).sum(), "penalty":
            "rows"}.
        rows: The dimension of rows in x, y and output, if it is not the first: see `commlib.pipeline.rows`; for example
            {"x": (0, "whole"), "output": 1}.
        optimizer: A function from named parameters to an optimizer, for schedules that update weights themselves.
        every: The number of microbatches between updates, in schedules that update weights themselves.
        example: An x with the rows of one microbatch, on rank 0, which then compares outputs, gradients and buffers of
            the stages with those of the whole model, in both modes. Needed by schedule="auto" and split="time", by the
            plan check of a model that `parallelize` has sharded without an example, and by a model that branches on the
            presence of an argument or on the value of a number, which is split for the arguments of the example.
        memory: With "auto": the most bytes of activations on a rank; None: any.
        verify: A batch, the arguments (x, y) of `step`, uncut and equal on every rank: all ranks make the comparison of
            `example`, and compare a step of the pipeline in evaluation mode with one of the whole model.

    Raises:
        UsageError: For arguments that are invalid on this rank, or on all ranks if a comparison finds a difference.
        MismatchError: On all ranks if their arguments differ.
        ScheduleError: For a schedule that cannot run.
    """
    check_batch_norm(batch_norm)
    constructors = model if are_constructors(model) else ()
    if constructors:
        if verify is not None or example is not None or schedule == "auto" or split == "time":
            raise UsageError(
                "pipeline: no rank builds all layers of a list of constructors, so nothing can be measured or "
                "compared: leave out verify= and example=, and pass schedule= and split="
            )
        model = outline(constructors)
    check_ready(model)
    check_loss(loss)
    recompute = resolve_recompute(model if isinstance(model, nn.Module) else layers_of(model), checkpoint)
    comm = communicator_of(ranks, "pipeline")
    check_batch_norms(comm, model)
    if example is not None:
        check_tensors("example=", example, "an x with the rows of one microbatch")
    x = unpack_batch(verify)[0] if example is None and verify is not None else example
    description = comm.broadcast_object(None if x is None else describe_arguments(arguments(x)))
    units = units_of(model, comm.size, description, recompute)
    chosen = choose_stages(
        comm, schedule, microbatches, split=split(model) if callable(split) else split, stages=stages, every=every,
        memory=memory, measure=lambda: costs_of(units, example, recompute), count=partial(compute_counts, units),
    )  # fmt: skip
    check_stages(
        comm, model, lambda: copy_of(units.cut([len(units.sizes())]).parts[0]),
        None if example is None else (({INPUTS: arguments(example)},), {}), calls_layers=isinstance(units, Layers),
    )  # fmt: skip
    pieces = units.cut(chosen.counts)
    shared = SharedObjects(pieces.parts, chosen.schedule.placement)
    spreads = not isinstance(model, nn.Sequential)
    if verify is not None:
        verify_cut(
            comm, model, pieces, verify, loss=loss, updates=bool(chosen.schedule.every),
            shared=shared, spreads=spreads,
            make=lambda cut, loss: Pipeline(
                comm, cut, chosen.schedule, loss=loss, recompute=recompute, codec=None, weigh=weigh,
                rows=rows_option(rows), optimizer=None,
            ),
        )  # fmt: skip
    elif description is not None:
        check_with_example(comm, model, pieces, example, shared=shared, spreads=spreads)
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
        pipe._steps.statistics = WholeBatchStatistics(list(pipe.parts))
    pipe.why = chosen.why
    if is_traced := isinstance(units, TracedModel):
        pipe._steps.readings = units.readings
    if isinstance(model, nn.Module) and not constructors:
        pipe._steps.layers = ModelLayers(model, pieces.parts)
    if description is None and not constructors and (is_traced or shared.exist):
        own = chosen.schedule.stages_of(comm.rank)
        pipe._steps.comparison = FirstComparison(pipe.pipe, model, pieces, own, shared=shared, warns=is_traced)
    return pipe


class Pipeline(StageModule):
    """The stages of a model on this rank. Made by `pipeline`.

    It has the parameters and buffers of its stages, under the names of the whole model; the rank of the last stage also
    has the parameters of a loss, as `loss.NAME`.
    """

    def __init__(
        self,
        comm: Communicator,
        pieces: SplitModel,
        schedule: Any,
        *,
        loss: Loss | None,
        recompute: Recompute,
        codec: Codecs,
        weigh: Weigh,
        rows: Rows,
        is_outline: bool = False,
        optimizer: MakeOptimizer | None,
    ) -> None:
        own, last = schedule.stages_of(comm.rank), schedule.stages - 1
        module = loss_module(loss, pieces.parts)
        names = {name for part in pieces.parts for name in part.state_dict()}
        names |= {f"{LOSS}.{name}" for name in (module.state_dict() if module is not None else ())}
        super().__init__({stage: pieces.parts[stage] for stage in own}, names, module if last in own else None)
        self._loading = Loading(pieces.parts, schedule.placement, comm.rank, loss=module, prefix=f"{LOSS}.")
        # For weights, the loss is part of the last stage.
        parts = [*pieces.parts[:-1], StageModule({last: pieces.parts[-1]}, names, module)]
        self._placeholder = (nn.Parameter(torch.empty(0), requires_grad=False),)  # a tuple hides it from nn.Module
        self.why = ""
        """The reason for this schedule, if it was chosen automatically."""
        losses = LossWeights(loss, Weigher(weigh, takes_summands=True), rows)
        self._tied = tied = TiedWeights.find(comm, parts, schedule.placement)
        check_updates(schedule, loss_has_parameters=module is not None, shares_weights=tied.exist)
        shared_buffers = SharedBuffers(parts, schedule.placement, comm.rank)
        self._names = names_by_name(parts)
        self._stages = stages_of(pieces, own, losses=losses, recompute=recompute)
        tensors = TorchTensors(next((parameter for _, parameter in self.named_parameters()), None))
        lines = [
            f"split {pieces.counts}",
            f"codec {codec}",
            f"checkpoint {recompute}",
            str(rows),
            f"weigh {describe(weigh)}",
        ]
        lines += [*lines_of(parts, is_outline=is_outline), *options_of_stages(pieces.parts), *options_of_loss(loss)]
        self._pipe = Pipe(comm, schedule, pieces.links, self._stages, tensors, codec=codec, lines=lines)
        if not schedule.every:
            look_at_weights(self._stages, self.parameters, parts, comm.rank)
        self._order_shared()
        tied.spread()
        give_optimizers(self._stages, schedule, optimizer)
        self._steps = StepRunner(
            self, self._pipe, self._stages, tensors, losses=losses, tied=tied, shared_buffers=shared_buffers, rows=rows,
            has_extras=any(keepers_in(part) for part in pieces.parts),
            on_meta=not is_outline and any(p.is_meta for part in parts for p in part.parameters()),
        )  # fmt: skip
        """Runs batches."""
        if comm.size > 1:
            before_steps.join(self)
            note_stages(self, comm, tied.is_counted_elsewhere)
            watch_norms()

    # User interface

    @disable_compile
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

        The loss includes the losses of layers, such as those of routers. Raises UsageError on all ranks if the losses
        of microbatches do not add up to that of the batch; gradients have been added by then. Gradients are added to
        existing ones, as one process does with the whole batch. x: a tensor, a tuple of arguments or a dict of keyword
        arguments, needed on the rank of the first stage; y: needed on the rank of the last. scale: a factor of the
        gradients, but not of the loss. cut: False if x and y are lists of at most as many microbatches as the schedule
        has, each with its own shapes. details, outputs: return `Details`, including the batch's outputs with
        outputs=True.
        """
        details = details or outputs
        return self._steps.train(x, y, scale=scale, cut=cut, details=details, keeps_outputs=outputs)

    @disable_compile
    def evaluate(
        self, x: Any = None, y: Any = None, *, cut: bool = True, details: bool = False, outputs: bool = False
    ) -> Any:
        """Return the loss of a batch in evaluation mode, on every rank. Arguments as in `step`. Collective."""
        return self._steps.evaluate(x, y, cut=cut, details=details or outputs, keeps_outputs=outputs)

    @disable_compile
    def predict(self, x: Any = None, *, cut: bool = True) -> Any:
        """Return the model's output for a batch in evaluation mode, on every rank. Collective.

        Raises UsageError for an output with rows in another dimension than `rows` of `pipeline`.
        """
        return self._steps.predict(x, cut=cut)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise UsageError: a batch goes through all ranks."""
        raise UsageError("a pipeline cannot be called: use step(x, y), evaluate(x, y) or predict(x), on every rank")

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
        """Scale the gradients of all stages to a total norm of at most `max_norm`; return the norm before scaling.

        norm_type: 2, any number above 0, or inf, as in torch.nn.utils.clip_grad_norm_. A weight shared by several
        stages counts once. The result has the same bits on all ranks. Collective. With error_if_nonfinite, raises
        UsageError on all ranks for an infinite or NaN norm; otherwise such a norm scales by 0 or NaN.
        """
        limit = check_limit("clip_grad_norm", "max_norm", max_norm)
        norm_type = check_norm_type("clip_grad_norm", norm_type)
        counted = [parameter for parameter in self.parameters() if not self._tied.is_counted_elsewhere(parameter)]
        powers = power_over_axes(powers_by_axis(counted, norm_type), norm_type)
        is_double = any(one.grad is not None and one.grad.dtype == torch.float64 for one in self.parameters())
        reports = self._pipe.comm.all_gather_object((powers, is_double))
        norm = norm_of_powers([own for own, _ in reports], norm_type)
        if error_if_nonfinite:
            check_finite("clip_grad_norm", norm)
        factor = clip_factor(norm, limit, epsilon=1e-6)
        if factor != 1:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        return torch.tensor(norm, dtype=torch.float64 if any(double for _, double in reports) else torch.float32)

    def picture(self, *, width: int | None = None) -> str:
        """Draw the schedule. Not collective."""
        return self._pipe.picture(width=width)

    def gather_state_dict(self) -> dict[str, Tensor]:
        """Return the state of the whole model, on every rank. Collective."""
        states = self._pipe.comm.all_gather_object(gather_shards(self))
        return {name: value for state in states for name, value in state.items()}

    def gather_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the state of the optimizers of all ranks, by names of the whole model, on every rank. Collective.

        `load_optimizer_state` loads it on any number of stages.
        """
        own = gather_optimizer_state(optimizer, self._by_all_names())
        return merge_states(self._pipe.comm.all_gather_object(own))

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Load this rank's values from a state that `gather_optimizer_state` returned. Not collective.

        Each parameter keeps its saved settings (learning rate, weight decay, ...). Raises UsageError if the state lacks
        a parameter, or if parameters of one group had different settings.
        """
        load_optimizer_state(optimizer, self._by_all_names(), state)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """Close this rank's part, after an exception too."""
        self.close()

    def close(self) -> None:
        """Close this rank's part of the pipeline, and notify the other ranks."""
        self._steps.comparison = None
        self._pipe.close()

    @property
    def pipe(self) -> Pipe:
        """The core's pipeline, which runs the schedule."""
        return self._pipe

    # Internal interface

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise UsageError for an optimizer step that is wrong with the weights of some stages only."""
        searches, scaler = isinstance(optimizer, torch.optim.LBFGS), scaler_of_step()
        is_early = self._pipe.is_running and self._pipe.schedule.weights is Weights.FLUSH
        if not searches and scaler is None and not is_early:
            return
        own = set(map(id, self.parameters()))
        if all(id(parameter) not in own for group in optimizer.param_groups for parameter in group["params"]):
            return
        if is_early:
            raise UsageError(
                "pipeline: an optimizer steps within a batch, for example in a gradient hook: it would step once per "
                "microbatch, with a part of the gradient. Step after pipe.step(), or use a schedule that updates "
                "weights while the pipeline runs, such as pipedream"
            )
        if searches:
            raise UsageError(
                "pipeline: LBFGS needs the gradients of all weights, and each rank has those of its own stages: use "
                "an optimizer that updates each weight separately, such as Adam"
            )
        if scaler is not None:
            advice = 'commlib_torch.GradScaler(ranks=mesh["pp"]), or ranks=mesh'
            check_scaler(scaler, world_ranks(self._pipe.comm), "stages", advice)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield this rank's parameters; if there are none, an empty one, because torch's optimizers require one."""
        none = True
        for _, parameter in self.named_parameters(recurse=recurse):
            none = False
            yield parameter
        if none:
            yield self._placeholder[0]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise UsageError: a pipeline cannot be copied or pickled on one rank."""
        raise UsageError(
            "a pipeline cannot be copied or pickled: this rank has only some of its stages. Save state_dict() (this "
            "rank's stages) or gather_state_dict() (the whole model's), and load it into a new pipeline"
        )

    def _order_shared(self) -> None:
        order_shared(self._stages, self._pipe.runner.last_gradients)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._order_shared()  # parameters may have been replaced
        return result

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load this rank's values from a state of the whole model, or a state of this rank's stages. Not collective.

        A state of the whole model is compared with all stages before a weight changes: missing or unexpected names and
        other shapes in any stage raise the same UsageError, in torch's words, on all ranks that load it. With
        strict=False, the missing names of all stages are returned.
        """
        missing = self._loading.check(state_dict, self._whole_names, strict=strict)
        result = super().load_state_dict(state_dict, strict, assign)
        result.missing_keys[:] = dict.fromkeys([*missing, *result.missing_keys])
        self._order_shared()
        return result

    def _by_all_names(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters under all their names in the whole model."""
        for name, parameter in self.named_parameters(remove_duplicate=False):
            for other in self._names.get(name, [name]):
                yield other, parameter
