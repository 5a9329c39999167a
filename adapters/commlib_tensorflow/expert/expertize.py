"""expertize: turn MLPs of a plain model of Keras into mixtures of experts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from commlib.communicator import Communicator
from commlib.comparison.agreement import agree_on_call, lines_of, options_of, said, together
from commlib.comparison.parameter_check import check_agreement
from commlib.errors import UsageError, line
from commlib.expert.experts import Experts
from commlib.expert.ranks import ExpertRanks, Ranks
from commlib.mesh_groups import Mesh
from commlib.tensor_parallel.plan import resolve
from commlib_tensorflow._keras3 import NO_XLA_DIVIDED, never_compile
from commlib_tensorflow._shards import shard_of
from commlib_tensorflow.expert._kept import kept_of_rank_0
from commlib_tensorflow.expert._of_each import check_alike, check_call, check_layer, check_plain, check_rows, check_tied
from commlib_tensorflow.expert.moe import MoE
from commlib_tensorflow.expert.verify import verify as verify_experts
from commlib_tensorflow.tensor._likeness import likeness
from commlib_tensorflow.tensor._values import values_of_rank_0
from commlib_tensorflow.tensor.names import layers_named, only

_FUNCTIONAL = type(keras.Model(_x := keras.Input(()), _x))
"""What Keras makes of `keras.Model(inputs, outputs)`."""


def expertize(
    model: keras.Model, ranks: Ranks, plan: Mapping[str, Experts], *, verify: Any = None, example: Any = None
) -> keras.Model:
    """Turn the MLPs that `plan` names into mixtures of experts among `ranks`, and return `model`.

    plan: experts by patterns of layers' names from the model down, `{"block_*/mlp": Experts(8, top_k=2)}`. ranks: a
    mesh, along its axis ep or a part of dp, or the communicator of the ranks that share the experts. Each MLP is a
    layer from (..., width) to the same, such as a Sequential; experts are layers like it, made from its configuration,
    with new values, or with copy=True its own values (upcycling: with a top_k above 1 the model computes at first what
    it did); with hidden= they are built-in MLPs instead. All else of the model gets the values that it has on rank 0.

    verify: a batch with which the model is called, this rank's own, for one forward and backward beside those of a
    dense mixture, all experts on each rank: see `commlib_tensorflow.expert.verify`. example: the same, but only outputs
    and the gradient of the first router are compared.

    The model must be built, and not trained yet; it stays the same object, as do its other layers. Collective. Raises
    UsageError on all ranks, for a plan that does not fit or gives other numbers; the model is as it was then.
    MismatchError if ranks have different models or plans.
    """
    comm = ranks.comm if isinstance(ranks, Mesh) else ExpertRanks.of(ranks, 1).data
    agree_on_call(comm, "expertize", plan=plan, verify=verify, example=example)
    found = together(comm, lambda: _found(model, plan))
    lines = [line for place, layer, experts in found for line in _lines(f"layer {place}", layer, experts)]
    check_agreement(comm, "expertize", [*lines, *(f"{v.dtype}{list(v.shape)}" for v in model.variables)])
    _compare(model, comm, found)
    made = {id(layer): _made(layer, experts, ranks) for _, layer, experts in found}
    before = [(layer, type(layer), dict(vars(layer))) for _, layer, _ in found]
    for _, layer, _ in found:
        _become(layer, made[id(layer)])
    never_compile(model)
    model.train_function = model.test_function = model.predict_function = None
    try:
        with _values_of_rank_0(model, comm, next(iter(made.values())).ranks.data):
            if verify is not None or example is not None:
                verify_experts(model, example if verify is None else verify, gradients=verify is not None)
    except BaseException:
        for layer, kind, own in before:
            layer.__class__ = kind
            vars(layer).clear()
            vars(layer).update(own)
        raise
    return model


def _compare(model: Any, comm: Communicator, found: Sequence[tuple[int, Any, Experts]]) -> None:
    """Raise MismatchError on all ranks if these have different models, but for MLPs that go. Collective."""
    layers = {name: same[0] for name, same in layers_named(model, "expertize").items()}
    copied, gone = (
        {
            id(one)
            for _, layer, experts in found
            for one in layer._flatten_layers()
            if (experts.hidden is None) is is_copied
        }
        for is_copied in (True, False)
    )
    left = {name: layer for name, layer in layers.items() if id(layer) not in gone}
    likeness(model, left, closely={name for name, layer in left.items() if id(layer) in copied}).compare(
        comm, "expertize"
    )


@contextmanager
def _values_of_rank_0(model: Any, comm: Communicator, data: Communicator) -> Iterator[None]:
    """Give all but the experts the values that they have on rank 0, parts of weights those of ranks with the same ones.

    And their own again if what follows raises. Ranks draw random numbers of their own. Collective.
    """
    whole, parts = ([one for one in model.weights if (shard_of(one) is None) is is_whole] for is_whole in (True, False))
    layers = [one for same in layers_named(model, "expertize").values() for one in same if not _is_ours(one)]
    with (
        values_of_rank_0("expertize", whole, comm),
        values_of_rank_0("expertize", parts, data),
        kept_of_rank_0(model, layers, comm),
    ):
        yield


def _is_ours(layer: Any) -> bool:
    return type(layer).__module__.partition(".")[0] == "commlib_tensorflow"


def _found(model: Any, plan: Mapping[str, Experts]) -> list[tuple[int, Any, Experts]]:
    """Return (place among all layers, layer, experts) of what a plan names."""
    if getattr(model, "_jit_compile", False):
        raise UsageError(NO_XLA_DIVIDED)
    if getattr(getattr(model, "optimizer", None), "built", False):
        raise UsageError("expertize: the model has been trained: its optimizer knows the weights that would go")
    named = layers_named(model, "expertize")
    places = {name: place for place, name in enumerate(named)}
    resolved = resolve(plan, list(named), (Experts,))
    found = [(places[name], only(name, named[name]), experts) for name, experts in resolved.items()]
    for place, layer, experts in found:
        name = list(named)[place]
        if isinstance(layer, MoE):
            raise UsageError(f"expertize: {name} is a mixture of experts already: leave it out of the plan")
        if not layer.built:
            raise UsageError(f"expertize: {name} is not built: call the model once, or give it an Input")
        check_layer(f"expertize: {name}", layer)
        width = width_of(name, layer)
        if experts.shared and experts.hidden is None:
            raise UsageError(f"expertize: {name}: shared experts are built-in MLPs: give hidden=, their features")
        if experts.copy and experts.hidden is not None:
            raise UsageError(f"expertize: {name}: copies of a dense MLP have its size: give copy=True or hidden=")
        if experts.hidden is not None:
            check_plain(f"expertize: {name}", layer)
            continue
        check_tied(f"expertize: {name}", layer, model)
        try:
            made = _like(layer)
        except Exception as error:
            why = line(error).partition(" using config=")[0]  # with the code of lambdas
            raise UsageError(
                f"expertize: {name} cannot be made from its configuration ({why}): "
                "give functions within it, such as activations, a name (a lambda has none) by keras.saving."
                "register_keras_serializable(), or give hidden= for built-in MLPs"
            ) from error
        check_layer(f"expertize: {name}", made)
        check_call(f"expertize: {name}", made, width)
        rows = tf.zeros((1, width), _policy(layer).compute_dtype)
        check_rows(f"expertize: {name}", rows, made(rows))
        check_alike(f"expertize: {name}", layer, made, width)
    return found


def width_of(name: str, layer: Any) -> int:
    """Return the features that an MLP takes and gives. Raises UsageError where its kernels do not say so."""
    kernels = [tuple(variable.shape) for variable in layer.variables if len(variable.shape) == 2]
    if not kernels or kernels[0][0] not in {outputs for _, outputs in kernels}:
        raise UsageError(
            f"expertize: {name} is a {type(layer).__name__}, expected an MLP whose first kernel takes the features "
            "that another one gives: for others put a MoE(experts, ranks, expert=...) in its place"
        )
    return int(kernels[0][0])


def _like(layer: Any) -> Any:
    """Return a new layer of the same configuration, built for rows [number, width], outside of any `RematScope`."""
    with keras.RematScope(mode=None):
        made = _unbuilt(layer)
        made(np.zeros((1, width_of(layer.name, layer)), layer.compute_dtype))
    return made


def _unbuilt(layer: Any) -> Any:
    """Return a new layer of the same configuration, but for the shape that it has been built for."""
    if type(layer) is keras.Sequential:
        return keras.Sequential([_unbuilt(inner) for inner in layer.layers])
    if type(layer) is _FUNCTIONAL and isinstance(layer.input, keras.KerasTensor):
        rows = keras.Input((layer.input.shape[-1],), dtype=layer.input.dtype)
        return keras.models.clone_model(layer, input_tensors=rows, clone_function=_unbuilt)
    return layer.__class__.from_config(_unseeded(layer.get_config()))


def _unseeded(config: Any) -> Any:
    """Return a configuration whose initializers have no seed of their own: all experts would begin as one."""
    if isinstance(config, list | tuple):
        return type(config)(map(_unseeded, config))
    if not isinstance(config, dict):
        return config
    found = {key: _unseeded(value) for key, value in config.items()}
    if config.get("module") == "keras.initializers" and "seed" in config.get("config", {}):
        found["config"]["seed"] = None
    return found


def _lines(name: str, layer: Any, experts: Experts) -> list[str]:
    """Return what all ranks must have in an MLP, its configuration without names, and say of its experts."""
    found = lines_of(name, options_of(experts))
    if experts.hidden is None:
        config = layer.get_config()
        places = {called: f"layer {place}" for place, called in enumerate(dict.fromkeys(_names(config)))}
        found += _settings(f"{name}: {type(layer).__name__}", config, places)
    if experts.copy:
        digests = [hashlib.sha256(values.tobytes()).hexdigest()[:16] for values in layer.get_weights()]
        found += [f"values of weight {number} of {name}: {digest}" for number, digest in enumerate(digests)]
    return found


_REFERRING = {"inbound_nodes", "input_layers", "output_layers"}
"""Settings of a model in which its layers are named."""


def _names(config: Any) -> Iterator[str]:
    """Yield the names of layers in a configuration, of which Keras counts some from other numbers on other ranks."""
    inner = config.values() if isinstance(config, dict) else config if isinstance(config, list | tuple) else ()
    if isinstance(config, dict) and isinstance(config.get("name"), str):
        yield config["name"]
    for one in inner:
        yield from _names(one)


def _settings(name: str, config: Any, places: Mapping[str, str]) -> list[str]:
    """Return each setting of a configuration without names, by where it stands; layers are told by place."""
    if isinstance(config, dict):
        pairs = [(str(key), config[key]) for key in sorted(config) if key not in ("name", "build_config")]
    elif isinstance(config, list | tuple):
        pairs = [(str(number), value) for number, value in enumerate(config)]
    else:
        refers = isinstance(config, str) and not _REFERRING.isdisjoint(name.split("."))
        return [f"{name}={places.get(config, config) if refers else said(config)}"]
    inner = [line for key, one in pairs for line in _settings(f"{name}.{key}", one, places)]
    return [f"{name}: {len(pairs)} settings", *inner]


def _made(layer: Any, experts: Experts, ranks: Ranks) -> MoE:
    make: Callable[[], Any] | None = None
    if experts.hidden is None:
        values = layer.get_weights() if experts.copy else None

        def make() -> Any:
            made = _like(layer)
            if values is not None:
                made.set_weights(values)
            return made

    found = MoE(experts, ranks, expert=make, name=layer.name, dtype=_policy(layer))
    found.mixture.name = found.ranks.first(layer.path or layer.name)  # Keras counts on each rank for itself
    found.build((None, width_of(layer.name, layer)))
    for variable in found.variables:
        variable._path = f"{layer.path or layer.name}/{variable.name}"
    return found


def _policy(layer: Any) -> Any:
    """Return the policy of dtypes by which an MLP computes: of models of Keras, which cast nothing, that of all layers.

    Where these have several, it is the model's own.
    """
    if not isinstance(layer, keras.Model):
        return layer.dtype_policy
    policies = {one.dtype_policy.name: one.dtype_policy for one in layer._flatten_layers() if one._trainable_variables}
    return next(iter(policies.values())) if len(policies) == 1 else layer.dtype_policy


def _become(layer: Any, made: MoE) -> None:
    """Let a layer be another one, at its place in the model: whoever has it, has the other one from then on."""
    nodes = {
        name: vars(layer)[name] for name in ("_inbound_nodes", "_outbound_nodes", "_parent_path") if name in vars(layer)
    }
    layer.__class__ = type(made)
    vars(layer).clear()
    vars(layer).update({**vars(made), **nodes})
    layer.whereabouts.belongs_to(layer)
