"""Every private name of Keras and TensorFlow that tfmw uses, by subject.

Checked on TensorFlow 2.18 to 2.21 with Keras 3.8 to 3.15. `missing_names()` returns the names that
the installed versions lack. A test calls it, so an incompatible release fails there first.

* `losses`: each replica's weight in the global batch. Read it first: it is why N workers have the
  results of one process.
* `batch_reduction`, `coupling`: which losses are sums or means, and which compare examples.
* `increments`: what steps add to variables of users' own metrics and layers.
* `masked_norm`: synchronized batch normalization of masked inputs.
* `optimizers`: updates on each replica, after one reduction of the gradients.
* `fused_update`: an optimizer's update as one compiled function.
* `optimizer_part`: the part of an optimizer's state that one worker keeps; `emptied`, variables
  whose memory it frees.
* `models`, `metrics`, `objects`: the parts and variables of a model, and how it is built.
* `placement`: a model's variables on the devices of a strategy, and back.
* `guards`: `model.fit` refused, and one writer, in a process that has joined a cluster.
* `wrapped_fit`: what other libraries have wrapped around `model.fit`.
* `datasets`: the inputs, functions and seeds of `tf.data` pipelines.
* `pipelines`: the time of the stages of a pipeline that runs.
* `serialization`: the state of a model, for another process.
* `runtime`: TensorFlow's runtime and its coordination service.
* `parameter_servers`: remote rows, iterators on workers, an optimizer's slots.
* `global_rows`: what all replicas of a step have, for layers that look at the global batch.
* `row_updates`: rows that a layer replaces in a step, and the optimizer's slots of them.
* `table_variables`: Keras variables whose rows are made on parameter servers.

May import: `tfmw.errors`, `tfmw.runtime`.
"""

from tfmw.keras_compat import (
    datasets,
    losses,
    masked_norm,
    metrics,
    models,
    optimizer_part,
    optimizers,
    parameter_servers,
    pipelines,
    row_updates,
    runtime,
    table_variables,
    wrapped_fit,
)
from tfmw.keras_compat.datasets import (
    REBUILDABLE,
    Batch,
    Map,
    NoneTensorSpec,
    OptionsNode,
    Prefetch,
    Repeat,
    Shuffle,
    Skip,
    Take,
    Zip,
    batch_arguments,
    batches_of_slices,
    data_adapter,
    dataset_constants,
    dataset_from_graph,
    dataset_functions,
    dataset_graph,
    dataset_input,
    global_seed,
    has_own_readers,
    is_dataset,
    is_deterministic,
    is_memory_cache,
    make_class_weight_map,
    map_graph_nodes,
    may_shuffle_inside,
    rebuilt,
    seed_state,
    set_seed_state,
    shuffle_seeds,
    shuffles_in,
    sliced_tensors,
    source_of_seeds,
    substituted_global_seed,
    train_validation_split,
    zipped_inputs,
)
from tfmw.keras_compat.fused_update import fused_update
from tfmw.keras_compat.global_rows import counts_of_all_replicas
from tfmw.keras_compat.increments import (
    assigned_in_layer,
    counting_batches_once,
    note_metric_update,
)
from tfmw.keras_compat.losses import (
    CannotCompile,
    ReplicaWeight,
    weighting_losses,
)
from tfmw.keras_compat.masked_norm import synchronize_masked_moments
from tfmw.keras_compat.metrics import (
    combination,
    flatten_metrics,
    leaf_metrics,
    metric_variables,
    recorded_assignments,
)
from tfmw.keras_compat.models import (
    NOTES_OF_CALLS,
    build_all,
    build_for_inputs,
    event_writers,
    is_model,
    is_synchronized_batch_norm,
    keep_message,
    keeps_state_of_examples,
    layers_of,
    limits_for_debugging,
    native,
    needs_build,
    overrides_step,
    profiles_batches,
    requested_initial_epoch,
    scope_of,
    seed_generators_of,
    set_native,
    settable_learning_rate,
    should_validate,
    state_variables_of,
    substituted,
)
from tfmw.keras_compat.objects import (
    items_in,
    overridden,
)
from tfmw.keras_compat.optimizers import (
    inner_optimizer,
    optimizer_variables,
    optimizers_of,
    replica_local_updates,
    stable_variable_keys,
    with_inner_optimizers,
)
from tfmw.keras_compat.parameter_servers import (
    RemoteRows,
    TracedOp,
    calls_function,
    cancelable,
    current_learning_rate,
    is_iterations,
    is_worker_failure,
    local_variable,
    looked_up_variables,
    lookups_through,
    more_is_better,
    moving_averages,
    one_op,
    optimized_variables,
    optimizer_slots,
    uses_weight_decay,
    worker_constants,
    worker_iterators,
)
from tfmw.keras_compat.pipelines import slowest_stage
from tfmw.keras_compat.row_updates import assign_rows, note_slots, reset_slots, resets_rows
from tfmw.keras_compat.runtime import (
    computes_with_onednn,
    configure_coordination,
    coordination_barrier,
    coordination_delete,
    coordination_get,
    coordination_report_error,
    coordination_set,
    require_task,
    runtime_started,
)
from tfmw.keras_compat.serialization import (
    backend_switch,
    is_functional,
    is_saveable,
    is_tracked_collection,
    make_functional,
    new_native,
    rebuild_variable_maps,
    saveable_state,
    variable_state,
)
from tfmw.keras_compat.table_variables import (
    Division,
    InitialRows,
    NewVariable,
    RowsElsewhere,
    StandIn,
    add_divided,
    division_of,
    initial_rows,
    make_variables_by,
    track_asset,
)

__all__ = [
    "NOTES_OF_CALLS",
    "REBUILDABLE",
    "Batch",
    "CannotCompile",
    "Division",
    "InitialRows",
    "Map",
    "NewVariable",
    "NoneTensorSpec",
    "OptionsNode",
    "Prefetch",
    "RemoteRows",
    "Repeat",
    "ReplicaWeight",
    "RowsElsewhere",
    "Shuffle",
    "Skip",
    "StandIn",
    "Take",
    "TracedOp",
    "Zip",
    "add_divided",
    "assign_rows",
    "assigned_in_layer",
    "backend_switch",
    "batch_arguments",
    "batches_of_slices",
    "build_all",
    "build_for_inputs",
    "calls_function",
    "cancelable",
    "combination",
    "computes_with_onednn",
    "configure_coordination",
    "coordination_barrier",
    "coordination_delete",
    "coordination_get",
    "coordination_report_error",
    "coordination_set",
    "counting_batches_once",
    "counts_of_all_replicas",
    "current_learning_rate",
    "data_adapter",
    "dataset_constants",
    "dataset_from_graph",
    "dataset_functions",
    "dataset_graph",
    "dataset_input",
    "division_of",
    "event_writers",
    "flatten_metrics",
    "fused_update",
    "global_seed",
    "has_own_readers",
    "initial_rows",
    "inner_optimizer",
    "is_dataset",
    "is_deterministic",
    "is_functional",
    "is_iterations",
    "is_memory_cache",
    "is_model",
    "is_saveable",
    "is_synchronized_batch_norm",
    "is_tracked_collection",
    "is_worker_failure",
    "items_in",
    "keep_message",
    "keeps_state_of_examples",
    "layers_of",
    "leaf_metrics",
    "limits_for_debugging",
    "local_variable",
    "looked_up_variables",
    "lookups_through",
    "make_class_weight_map",
    "make_functional",
    "make_variables_by",
    "map_graph_nodes",
    "may_shuffle_inside",
    "metric_variables",
    "missing_names",
    "more_is_better",
    "moving_averages",
    "native",
    "needs_build",
    "new_native",
    "note_metric_update",
    "note_slots",
    "one_op",
    "optimized_variables",
    "optimizer_slots",
    "optimizer_variables",
    "optimizers_of",
    "overridden",
    "overrides_step",
    "profiles_batches",
    "rebuild_variable_maps",
    "rebuilt",
    "recorded_assignments",
    "replica_local_updates",
    "requested_initial_epoch",
    "require_task",
    "reset_slots",
    "resets_rows",
    "runtime_started",
    "saveable_state",
    "scope_of",
    "seed_generators_of",
    "seed_state",
    "set_native",
    "set_seed_state",
    "settable_learning_rate",
    "should_validate",
    "shuffle_seeds",
    "shuffles_in",
    "sliced_tensors",
    "slowest_stage",
    "source_of_seeds",
    "stable_variable_keys",
    "state_variables_of",
    "substituted",
    "substituted_global_seed",
    "synchronize_masked_moments",
    "track_asset",
    "train_validation_split",
    "uses_weight_decay",
    "variable_state",
    "weighting_losses",
    "with_inner_optimizers",
    "worker_constants",
    "worker_iterators",
    "zipped_inputs",
]


def missing_names() -> list[str]:
    """Private names that tfmw uses and the installed versions lack; [] if all exist."""
    modules = (
        losses,
        masked_norm,
        optimizers,
        optimizer_part,
        models,
        metrics,
        datasets,
        runtime,
        parameter_servers,
        pipelines,
        row_updates,
        table_variables,
        wrapped_fit,
    )
    return [
        f"{getattr(owner, '__name__', owner)}.{name}"
        for module in modules
        for owner, name in module.PRIVATE_NAMES
        if not hasattr(owner, name)
    ]
