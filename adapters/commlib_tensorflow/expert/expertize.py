"""expertize: turn MLPs of a plain Keras model into mixtures of experts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from commlib.communicator import Communicator
from commlib.comparison.agreement import agree_on_call, describe, lines_of, options_of, run_together
from commlib.comparison.parameter_check import check_agreement
from commlib.errors import UsageError, line
from commlib.expert.expert_ranks import ExpertRanks, MixtureRanks
from commlib.expert.experts import Experts
from commlib.mesh_groups import Mesh
from commlib.tensor_parallel.plan import resolve
from commlib_tensorflow._keras3 import NO_XLA_DIVIDED, never_compile
from commlib_tensorflow._shards import shard_of
from commlib_tensorflow._trial_run import check_batches
from commlib_tensorflow.expert._attribute_state import broadcast_attribute_state
from commlib_tensorflow.expert._expert_settings import (
    check_call,
    check_layer,
    check_plain,
    check_rows,
    check_same_outputs,
    check_tied,
)
from commlib_tensorflow.expert.moe import MoE
from commlib_tensorflow.expert.verify import verify as verify_experts
from commlib_tensorflow.tensor._structure import structure_of
from commlib_tensorflow.tensor._values import use_rank_0_values
from commlib_tensorflow.tensor.names import layers_named, single_layer

_FUNCTIONAL = type(keras.Model(_x := keras.Input(()), _x))
"""The class of `keras.Model(inputs, outputs)`."""


def expertize(
    model: keras.Model, ranks: MixtureRanks, plan: Mapping[str, Experts], *, verify: Any = None, example: Any = None
) -> keras.Model:
    """Turn the MLPs that `plan` names into mixtures of experts over `ranks`, and return `model`.

    Each MLP is a layer from (..., width) to the same shape, such as a Sequential. Experts are layers like it, made from
    its configuration, with new values, or with copy=True its values (upcycling: with a `top_k` above 1 the model's
    outputs are the same at first); with hidden= they are built-in MLPs instead. All other weights of the model get rank
    0's values.

    The model must be built, and not trained yet; it stays the same object, and so do its other layers. Collective.

    Args:
        model: A built model.
        ranks: The ranks that share the experts, such as `mesh["ep"]`, or a mesh of any number of axes, for its axis ep
            or a part of dp.
        plan: Experts by patterns of layers' names from the model down, `{"block_*/mlp": Experts(8, top_k=2)}`.
        verify: A batch for the model, this rank's own: one forward and backward is compared with a dense mixture, with
            all experts on each rank: see `commlib_tensorflow.expert.verify`.
        example: As `verify`, but only outputs and the gradient of the first router are compared.

    Raises:
        UsageError: On all ranks, for a plan that does not fit or changes results; the model is restored then.
        MismatchError: If ranks have different models or plans.
    """
    comm = ranks.comm if isinstance(ranks, Mesh) else ExpertRanks.of(ranks, 1).data
    agree_on_call(comm, "expertize", plan=plan, verify=verify, example=example)
    check_batches("expertize", verify=verify, example=example)
    mlps = run_together(comm, lambda: _find_mlps(model, plan))
    lines = [line for place, layer, experts in mlps for line in _lines(f"layer {place}", layer, experts)]
    check_agreement(comm, "expertize", [*lines, *(f"{v.dtype}{list(v.shape)}" for v in model.variables)])
    _compare(model, comm, mlps)
    mixtures = {id(layer): _make_mixture(layer, experts, ranks) for _, layer, experts in mlps}
    before = [(layer, type(layer), dict(vars(layer))) for _, layer, _ in mlps]
    for _, layer, _ in mlps:
        _become(layer, mixtures[id(layer)])
    never_compile(model)
    model.train_function = model.test_function = model.predict_function = None
    try:
        with _values_of_rank_0(model, comm, next(iter(mixtures.values())).ranks.data):
            if verify is not None or example is not None:
                verify_experts(model, example if verify is None else verify, gradients=verify is not None)
    except BaseException:
        for layer, kind, own in before:
            layer.__class__ = kind
            vars(layer).clear()
            vars(layer).update(own)
        raise
    return model


def _compare(model: Any, comm: Communicator, mlps: Sequence[tuple[int, Any, Experts]]) -> None:
    """Raise MismatchError on all ranks if their models differ, except in the replaced MLPs. Collective."""
    layers = {name: same[0] for name, same in layers_named(model, "expertize").items()}
    copied, not_copied = (
        {
            id(one)
            for _, layer, experts in mlps
            for one in layer._flatten_layers()
            if (experts.hidden is None) is is_copied
        }
        for is_copied in (True, False)
    )
    left = {name: layer for name, layer in layers.items() if id(layer) not in not_copied}
    structure_of(model, left, closely={name for name, layer in left.items() if id(layer) in copied}).compare(
        comm, "expertize"
    )


@contextmanager
def _values_of_rank_0(model: Any, comm: Communicator, data: Communicator) -> Iterator[None]:
    """Assign rank 0's values to all weights except experts; a shard gets the values of the first rank that has it.

    The own values are restored if the body raises. Random states of ranks stay different. Collective.
    """
    whole, parts = ([one for one in model.weights if (shard_of(one) is None) is is_whole] for is_whole in (True, False))
    layers = [one for same in layers_named(model, "expertize").values() for one in same if not _is_ours(one)]
    with (
        use_rank_0_values("expertize", whole, comm),
        use_rank_0_values("expertize", parts, data),
        broadcast_attribute_state(model, layers, comm),
    ):
        yield


def _is_ours(layer: Any) -> bool:
    return type(layer).__module__.partition(".")[0] == "commlib_tensorflow"


def _find_mlps(model: Any, plan: Mapping[str, Experts]) -> list[tuple[int, Any, Experts]]:
    """Return (index among all layers, layer, experts) for each entry of a plan."""
    if getattr(model, "_jit_compile", False):
        raise UsageError(NO_XLA_DIVIDED)
    if getattr(getattr(model, "optimizer", None), "built", False):
        raise UsageError("expertize: the model has been trained: its optimizer has the replaced weights")
    named = layers_named(model, "expertize")
    places = {name: place for place, name in enumerate(named)}
    resolved = resolve(plan, list(named), (Experts,))
    mlps = [(places[name], single_layer(name, named[name]), experts) for name, experts in resolved.items()]
    for place, layer, experts in mlps:
        name = list(named)[place]
        if isinstance(layer, MoE):
            raise UsageError(f"expertize: {name} is a mixture of experts already: leave it out of the plan")
        if not layer.built:
            raise UsageError(f"expertize: {name} is not built: call the model once, or give it an Input")
        sharded = [one.path for one in layer.variables if shard_of(one) is not None]
        experts.check_conversion(f"expertize: {name}", next(iter(sharded), ""))
        check_layer(f"expertize: {name}", layer)
        width = width_of(name, layer)
        if experts.hidden is not None:
            check_plain(f"expertize: {name}", layer)
            continue
        check_tied(f"expertize: {name}", layer, model)
        try:
            copied = _copy_layer(layer)
        except Exception as error:
            why = line(error).partition(" using config=")[0]  # drops the code of lambdas
            raise UsageError(
                f"expertize: {name} cannot be made from its configuration ({why}): "
                "register its functions, such as activations, under a name (a lambda has none) by keras.saving."
                "register_keras_serializable(), or use hidden= for built-in MLPs"
            ) from error
        check_layer(f"expertize: {name}", copied)
        check_call(f"expertize: {name}", copied, width)
        rows = tf.zeros((1, width), _policy(layer).compute_dtype)
        check_rows(f"expertize: {name}", rows, copied(rows))
        check_same_outputs(f"expertize: {name}", layer, copied, width)
    return mlps


def width_of(name: str, layer: Any) -> int:
    """Return the number of input and output features of an MLP. Raises UsageError if its kernels do not show it."""
    kernels = [tuple(variable.shape) for variable in layer.variables if len(variable.shape) == 2]
    if not kernels or kernels[0][0] not in {outputs for _, outputs in kernels}:
        raise UsageError(
            f"expertize: {name} is a {type(layer).__name__}, expected an MLP whose first kernel takes as many features "
            "as another kernel returns: replace other layers with a MoE(experts, ranks, expert=...) yourself"
        )
    return int(kernels[0][0])


def _copy_layer(layer: Any) -> Any:
    """Return a new layer with the same configuration, built for rows [number, width], outside of any `RematScope`."""
    with keras.RematScope(mode=None):
        copied = _unbuilt_copy(layer)
        copied(np.zeros((1, width_of(layer.name, layer)), layer.compute_dtype))
    return copied


def _unbuilt_copy(layer: Any) -> Any:
    """Return a new layer with the same configuration, except its built shape."""
    if type(layer) is keras.Sequential:
        return keras.Sequential([_unbuilt_copy(inner) for inner in layer.layers])
    if type(layer) is _FUNCTIONAL and isinstance(layer.input, keras.KerasTensor):
        rows = keras.Input((layer.input.shape[-1],), dtype=layer.input.dtype)
        return keras.models.clone_model(layer, input_tensors=rows, clone_function=_unbuilt_copy)
    return layer.__class__.from_config(_remove_seeds(layer.get_config()))


def _remove_seeds(config: Any) -> Any:
    """Return a configuration without seeds in its initializers: otherwise all experts would start equal."""
    if isinstance(config, list | tuple):
        return type(config)(map(_remove_seeds, config))
    if not isinstance(config, dict):
        return config
    result = {key: _remove_seeds(value) for key, value in config.items()}
    if config.get("module") == "keras.initializers" and "seed" in config.get("config", {}):
        result["config"]["seed"] = None
    return result


def _lines(name: str, layer: Any, experts: Experts) -> list[str]:
    """Return lines that ranks compare: an MLP's configuration without names, and the options of its experts."""
    lines = lines_of(name, options_of(experts))
    if experts.hidden is None:
        config = layer.get_config()
        places = {called: f"layer {place}" for place, called in enumerate(dict.fromkeys(_names(config)))}
        lines += _settings(f"{name}: {type(layer).__name__}", config, places)
    if experts.copy:
        digests = [hashlib.sha256(values.tobytes()).hexdigest()[:16] for values in layer.get_weights()]
        lines += [f"values of weight {number} of {name}: {digest}" for number, digest in enumerate(digests)]
    return lines


_REFERRING = {"inbound_nodes", "input_layers", "output_layers"}
"""Settings of a model that refer to its layers by name."""


def _names(config: Any) -> Iterator[str]:
    """Yield the names of layers in a configuration; Keras numbers some of them differently on other ranks."""
    inner = config.values() if isinstance(config, dict) else config if isinstance(config, list | tuple) else ()
    if isinstance(config, dict) and isinstance(config.get("name"), str):
        yield config["name"]
    for one in inner:
        yield from _names(one)


def _settings(name: str, config: Any, places: Mapping[str, str]) -> list[str]:
    """Return each setting of a configuration without names, with its location; layers are identified by index."""
    if isinstance(config, dict):
        pairs = [(str(key), config[key]) for key in sorted(config) if key not in ("name", "build_config")]
    elif isinstance(config, list | tuple):
        pairs = [(str(number), value) for number, value in enumerate(config)]
    else:
        refers = isinstance(config, str) and not _REFERRING.isdisjoint(name.split("."))
        return [f"{name}={places.get(config, config) if refers else describe(config)}"]
    inner = [line for key, one in pairs for line in _settings(f"{name}.{key}", one, places)]
    return [f"{name}: {len(pairs)} settings", *inner]


def _make_mixture(layer: Any, experts: Experts, ranks: MixtureRanks) -> MoE:
    make: Callable[[], Any] | None = None
    if experts.hidden is None:
        values = layer.get_weights() if experts.copy else None

        def make() -> Any:
            copied = _copy_layer(layer)
            if values is not None:
                copied.set_weights(values)
            return copied

    moe = MoE(experts, ranks, expert=make, name=layer.name, dtype=_policy(layer))
    moe.mixture.name = moe.ranks.first(layer.path or layer.name)  # Keras' names may differ between ranks
    moe.build((None, width_of(layer.name, layer)))
    for variable in moe.variables:
        variable._path = f"{layer.path or layer.name}/{variable.name}"
    return moe


def _policy(layer: Any) -> Any:
    """Return an MLP's dtype policy: for Keras models, which cast nothing, the policy of their layers.

    If the layers have several, it is the model's own.
    """
    if not isinstance(layer, keras.Model):
        return layer.dtype_policy
    policies = {one.dtype_policy.name: one.dtype_policy for one in layer._flatten_layers() if one._trainable_variables}
    return next(iter(policies.values())) if len(policies) == 1 else layer.dtype_policy


def _become(layer: Any, mixture: MoE) -> None:
    """Turn a layer into another one in place: all references to it then mean the new one."""
    nodes = {
        name: vars(layer)[name] for name in ("_inbound_nodes", "_outbound_nodes", "_parent_path") if name in vars(layer)
    }
    layer.__class__ = type(mixture)
    vars(layer).clear()
    vars(layer).update({**vars(mixture), **nodes})
    layer.whereabouts.attach_to(layer)
