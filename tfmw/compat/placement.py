"""Places a user's Keras model on the replicas of a strategy, and restores it.

    with placed(model, strategy):
        ...                        # each replica has its own copy of every variable
    model.predict(x)               # an ordinary Keras model again, trained

The model is not rebuilt: it is the user's own object. Placement changes only the `tf.Variable`s
inside its Keras variables. With one replica in this process they keep their own. With several
replicas, or for a model created in a strategy's scope, each Keras variable gets one copy per
device. The aggregation is NONE: a replica updates its own copy, and copies stay equal because all
replicas apply the same all-reduced gradients. At the end each Keras variable gets its own
`tf.Variable` back, with the new value. So other references to that `tf.Variable`, in a saved
function or an export, stay valid.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmw.compat import memory
from tfmw.compat.assigned_weights import Assignable
from tfmw.compat.kept import kept_with
from tfmw.compat.metric_variables import leaf_metrics, metric_variables
from tfmw.compat.models import (
    keep_message,
    layers_of,
    native,
    set_native,
    substituted,
    unseeded_state,
)
from tfmw.compat.objects import held_by, overridden, unique
from tfmw.compat.optimizers import optimizers_of, stable_variable_keys
from tfmw.errors import UsageError

# Multiplied by the replica number and combined with the seeds, so that dropout masks differ between
# replicas.
SEED_STEP = 0x9E3779B1  # 2**32 / golden ratio: neighbouring replicas have distant seeds


def all_variables(model: keras.Model) -> list[Any]:
    """Every Keras variable of the model, its optimizers, metrics and losses, each once."""
    found = [*model.variables, *_optimizer_state(model), *metric_variables(model)]
    found += _own_seeds(model)
    return unique(variable for variable in found if isinstance(variable, keras.Variable))


def shared_variables(model: keras.Model) -> list[Any]:
    """Variables that are equal on all replicas at the start; seeds are not, in a nested call."""
    variables = all_variables(model)
    if is_placed(model):
        return unique(variables, without=seeds_of(model))
    unseeded = unseeded_state()  # unless an outer call has placed it with its model
    return variables if unseeded is None or is_placed(unseeded) else [*variables, unseeded]


def updated_variables(model: keras.Model) -> list[Any]:
    """Trainable weights and the optimizers' state, which updates change, without repetitions."""
    return unique([*model.trainable_variables, *_optimizer_state(model)])


def _optimizer_state(model: keras.Model) -> list[Any]:
    return [variable for optimizer in optimizers_of(model) for variable in optimizer.variables]


def assignable_variables(model: keras.Model) -> dict[int, Assignable]:
    """Id of a handle -> variable, for each copy in this process."""
    apart = {id(v): v for v in [*seeds_of(model), *metric_variables(model)]}
    layers = {
        id(variable): type(layer).__module__.startswith("keras.")
        for layer in layers_of(model)
        for variable in getattr(layer, "_non_trainable_variables", [])
    }
    return {
        id(copy.handle): Assignable(
            variable, id(variable) in layers, bool(layers.get(id(variable))), id(variable) in apart
        )
        for variable in [*all_variables(model), *apart.values()]
        for copy in memory.copies_of(native(variable))
    }


def seeds_of(model: keras.Model) -> list[Any]:
    """The state of each of the model's seed generators, and of Keras's unseeded generator."""
    unseeded = unseeded_state()
    return _own_seeds(model) if unseeded is None else [*_own_seeds(model), unseeded]


def _own_seeds(model: keras.Model) -> list[Any]:
    """The state of each seed generator of the model's layers, metrics and losses."""
    generators = [g for layer in layers_of(model) for g in getattr(layer, "_seed_generators", [])]
    for owner in [*leaf_metrics(model), *keras.tree.flatten(getattr(model, "loss", None))]:
        if hasattr(owner, "__dict__"):
            held = (value for _, value in held_by(owner))
            generators += [g for g in held if isinstance(g, keras.random.SeedGenerator)]
    return [generator.state for generator in unique(generators)]


@dataclasses.dataclass(frozen=True)
class Placement:
    """The variables of a model while it is placed.

    Attributes:
        variables: the Keras variables that have copies; empty if they keep their own `tf.Variable`.
        originals: the own `tf.Variable` of each.
    """

    model: keras.Model
    strategy: tf.distribute.Strategy
    variables: list[Any]
    originals: list[Any]

    def bring_back(self) -> None:
        """Restores the original of each variable, with the value of the first local replica."""
        # In the scope, as the model may have been created in it: then each original has copies.
        with self.strategy.scope():
            for variable, original in zip(self.variables, self.originals, strict=True):
                _assign(original, local_copies(self.strategy, variable)[0])
                set_native(variable, original)

    def free_originals(self) -> None:
        """Frees the originals of variables whose copies are empty, such as sharded slots."""
        for variable, original in zip(self.variables, self.originals, strict=True):
            if memory.is_freed(native(variable)):
                memory.free(original)

    @contextlib.contextmanager
    def suspended(self, replicas_own: list[Any]) -> Iterator[None]:
        """Turns the model into an ordinary Keras model in this context, as callbacks expect it.

        Afterwards all local replicas have the values that its variables get there.

        Args:
            replicas_own: variables that differ between replicas, such as metrics. In the context
                they have the value of the first local replica. Only if that is changed, as by
                `reset_metrics`, all local replicas get the new value.
        """
        if not self.variables:
            yield
            return
        own = {id(variable) for variable in replicas_own}
        copies = [native(variable) for variable in self.variables]
        placed_here = {id(variable) for variable in self.variables}
        seeds = [seed for seed in seeds_of(self.model) if id(seed) in placed_here]
        self.bring_back()
        of_first = {
            i: memory.copies_of(native(v))[0].numpy() for v in self.variables if (i := id(v)) in own
        }
        _vary_seeds(self.strategy, seeds)
        kept_with(self.model).is_placed = False
        try:
            yield
        finally:
            kept_with(self.model).is_placed = True
            for variable, original, copy in zip(
                self.variables, self.originals, copies, strict=True
            ):
                set_native(variable, copy)
                before, now = of_first.get(id(variable)), memory.copies_of(original)[0]
                if before is None or not np.array_equal(before, now.numpy(), equal_nan=True):
                    _assign_copies(copy, original)
            _vary_seeds(self.strategy, seeds)


def _assign_copies(copy: tf.Variable, original: tf.Variable) -> None:
    """Assigns the value of an original to all copies of this process."""
    value = memory.copies_of(original)[0]
    for each in memory.copies_of(copy):
        _assign(each, value)
        # A sum made in the scope is divided between its copies. Reading it would be a collective,
        # and other processes may not be here.
        if isinstance(original, tf.distribute.DistributedValues) and not memory.is_freed(each):
            if original.synchronization == tf.VariableSynchronization.ON_READ and (
                original.aggregation == tf.VariableAggregation.SUM
            ):
                replicas = original.distribute_strategy.num_replicas_in_sync
                each.assign(each.read_value() * replicas)


def _assign(to: tf.Variable, value: tf.Variable) -> None:
    """Assigns the value of another variable; frees the variable if the other is freed."""
    if memory.is_freed(value):
        memory.free(to)
    else:
        memory.assign(to, value.read_value())


@contextlib.contextmanager
def placed(
    model: keras.Model,
    strategy: tf.distribute.Strategy,
    copies: dict[int, tf.Variable],
    seeds_vary: bool = True,
) -> Iterator[Placement]:
    """Places the model on every replica of `strategy` and restores it at the end.

    Args:
        model: compiled and built, with its optimizer built; it is the same on all workers
            (`agreement`).
        strategy: a synchronous strategy.
        copies: id of a Keras variable -> the replacement of its `tf.Variable`. Copies of an earlier
            placement are reused, and so are functions traced with them; new ones are added.
        seeds_vary: whether each replica draws its own random numbers.
    """
    variables = shared_variables(model)
    # In a nested call seeds already differ between replicas.
    varied = seeds_vary and not is_placed(model)
    seeds = [s for s in seeds_of(model) if varied and not is_placed(s)]
    originals = [native(v) for v in variables]
    distributed = any(isinstance(v, tf.distribute.DistributedValues) for v in originals)
    if strategy.num_replicas_in_sync == 1:
        with _single_copies(model, strategy) if distributed else contextlib.nullcontext():
            yield Placement(model, strategy, [], [])
        return
    if local_replicas(strategy) == 1 and not distributed:
        with _seeds_varied(model, strategy, seeds):
            yield Placement(model, strategy, [], [])
        return
    placement = Placement(model, strategy, variables, originals)
    with stable_variable_keys(optimizers_of(model), model.trainable_variables):
        with strategy.scope():
            for variable, original in zip(variables, originals, strict=True):
                copy = copies.get(id(variable))
                if copy is None:
                    copies[id(variable)] = copy = tf.Variable(
                        original.read_value(),
                        trainable=original.trainable,
                        name=original.name.split(":")[0],
                        aggregation=tf.VariableAggregation.NONE,
                    )
                else:
                    _assign_copies(copy, original)
                set_native(variable, copy)
        try:
            with _seeds_varied(model, strategy, seeds):
                yield placement
        finally:
            placement.bring_back()


@contextlib.contextmanager
def _single_copies(model: keras.Model, strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Makes the model use the only copy of each variable that was created in the scope."""
    copies = [(v, local_copies(strategy, v)[0]) for v in all_variables(model)]
    stable = stable_variable_keys(optimizers_of(model), model.trainable_variables)
    with stable, substituted(copies):
        yield


def is_placed(part: Any) -> bool:
    """Whether a model, or the state of a seed generator, is placed with a seed for each replica."""
    return kept_with(part).is_placed


@contextlib.contextmanager
def _seeds_varied(
    model: keras.Model, strategy: tf.distribute.Strategy, seeds: list[Any]
) -> Iterator[None]:
    with overridden([(kept_with(part), "is_placed", True) for part in (model, *seeds)]):
        _vary_seeds(strategy, seeds)
        try:
            yield
        finally:
            _vary_seeds(strategy, seeds)


def local_copies(strategy: tf.distribute.Strategy, variable: Any) -> list[tf.Variable]:
    """This process's copies of a placed Keras variable, one per local replica."""
    copies: list[tf.Variable] = list(strategy.experimental_local_results(native(variable)))
    return copies


def local_replicas(strategy: tf.distribute.Strategy) -> int:
    """Number of replicas in this process."""
    if strategy.num_replicas_in_sync == 1:
        return 1  # TensorFlow's default strategy has no list of devices
    return len(strategy.extended.worker_devices)


def spans_processes(strategy: tf.distribute.Strategy) -> bool:
    """Whether there are replicas in several processes."""
    return strategy.num_replicas_in_sync > local_replicas(strategy)


def first_local_replica(strategy: tf.distribute.Strategy) -> int:
    """The number, over all processes, of this process's first replica."""
    if not spans_processes(strategy):
        return 0
    resolver = strategy.cluster_resolver
    spec = resolver.cluster_spec().as_dict()
    before = len(spec.get("chief", [])) if resolver.task_type == "worker" else 0
    return (before + resolver.task_id) * local_replicas(strategy)


def _vary_seeds(strategy: tf.distribute.Strategy, seeds: list[Any]) -> None:
    """Combines the replica number with the seeds by XOR; a second call restores them.

    Replica 0 keeps its seeds, so the model ends with the seeds of training in one process.
    """
    first = first_local_replica(strategy)
    for state in seeds:
        for local, copy in enumerate(local_copies(strategy, state)):
            value = copy.numpy()
            copy.assign(value ^ _fold(first + local).astype(value.dtype))


def vary_seeds(model: keras.Model, replica: int) -> None:
    """Changes the seeds as placement does at its start and end, in a replica's context."""
    for state in seeds_of(model) if replica else []:
        value = state.value
        state.assign(tf.bitwise.bitwise_xor(value, tf.constant(_fold(replica), value.dtype)))


def _fold(replica: int) -> np.ndarray:
    """int64 [2]: the XOR difference of a replica's seeds from those of replica 0."""
    return np.array([replica * SEED_STEP & 0x7FFFFFFF, 0])


def raw_variables(model: keras.Model) -> list[tuple[str, tf.Variable]]:
    """(where it is, the variable) of raw `tf.Variable`s of layers, which Keras does not track."""
    return [
        (f"{name!r} of layer {layer.name!r} ({type(layer).__name__})", value)
        for layer in layers_of(model)
        # Keras's own layers keep constants in raw variables, such as tf-idf weights.
        if not type(layer).__module__.startswith("keras.")
        for name, value in held_by(layer)
        if isinstance(value, tf.Variable) and not isinstance(value, tf.distribute.DistributedValues)
    ]


def refuse_raw_variables(model: keras.Model) -> None:
    """Raises UsageError for a layer with a raw `tf.Variable`."""
    for where, _ in raw_variables(model):
        raise UsageError(
            f"{where} is a raw tf.Variable, which Keras does not track and no task would share: "
            "create it with self.add_weight(...) instead."
        )


def refuse_saved_models(model: keras.Model) -> None:
    """Raises UsageError for a SavedModel that is trained: its functions keep its own variables."""
    for layer in layers_of(model):
        is_saved = isinstance(layer, keras.layers.TFSMLayer)
        if is_saved and (layer.trainable_variables or layer.call_training_endpoint):
            raise UsageError(
                f"the layer {layer.name!r} is a TFSMLayer that is trained: its SavedModel has one "
                "copy of its variables, but each replica in a process, and each worker of "
                "parameter servers, needs its own. Set trainable=False, without a "
                "call_training_endpoint, or train with one replica in each process."
            )


@contextlib.contextmanager
def raw_variables_constant(model: keras.Model, processes: int) -> Iterator[None]:
    """Prevents changes of raw `tf.Variable`s on one replica or process alone, in this context."""

    def refusing(where: str, assign: Any) -> Any:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            if processes == 1 and not tf.distribute.has_strategy():
                return assign(*args, **kwargs)  # an assignment by a callback
            error = UsageError(
                f"{where} is a raw tf.Variable and is assigned while the model is trained: Keras "
                "does not track it, and no replica would share its value. Create it with "
                "self.add_weight(...) instead."
            )
            keep_message(error)
            raise error

        return refuse

    assigning = [n for n in dir(tf.Variable) if n.startswith(("assign", "scatter_", "batch_scat"))]
    overrides = [
        (variable, name, refusing(where, getattr(variable, name)))
        for where, variable in raw_variables(model)
        for name in assigning
        if hasattr(variable, name)
    ]
    with overridden(overrides):
        yield


def refuse_other_scope(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Raises UsageError if the model was created in the scope of another strategy.

    TensorFlow's variables of one strategy can be neither read nor updated in another one.
    """
    for variable in all_variables(model):
        value = native(variable)
        if not isinstance(value, tf.distribute.DistributedValues):
            continue
        own = value.distribute_strategy
        if own is not strategy:
            raise UsageError(
                f"model {model.name!r} was made in the scope of a {type(own).__name__} of your "
                "own, and this call runs on another strategy: make the model outside of any "
                "scope, as tfmw places it on the replicas, or pass strategy= the one of the scope."
            )
