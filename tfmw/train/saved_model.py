"""Export of a trained model as a SavedModel: one writer, an atomic write, with checksums.

    tfmw.export(model, "models/digits")                        # the chief writes

    # anywhere, in one process, without tfmw
    outputs = tf.saved_model.load("models/digits").signatures["serving_default"](image=images)
    outputs = keras.layers.TFSMLayer("models/digits", call_endpoint="serve")(images)

    problems = verify("models/digits")                         # [] or one sentence for each problem

The directory is written under a temporary name beside its own, flushed to the disk and renamed. A
crash leaves the old export, the new one or none, never a partial one.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import keras
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2  # the format of saved_model.pb

from tfmw.cluster import membership
from tfmw.compat import placement
from tfmw.compat.table_variables import track_asset
from tfmw.errors import UsageError, first_line, require_choice
from tfmw.observe.progress import blocking_call
from tfmw.storage import directories, disk
from tfmw.storage.bucket import refuse_writing
from tfmw.tables.files import whole_tables
from tfmw.tables.row_files import tables_in_files

if TYPE_CHECKING:
    from tfmw.cluster import Cluster

__all__ = ["MANIFEST", "check_path", "export", "verify_export"]

MANIFEST = "tfmw_manifest.json"
# version of the manifest's format: {"format": 1, "files": {"saved_model.pb": {"sha256", "bytes"}}}
_FORMAT = 1


@blocking_call("export")
def export(
    model: keras.Model,
    path: str | os.PathLike[str],
    *,
    pass_through: Mapping[str, tf.TensorSpec] | None = None,
    input_signature: Any = None,
    tables: Literal["whole", "sharded"] = "whole",
    cluster: Cluster | None = None,
) -> str | None:
    """Writes `model` to `path` as a SavedModel, on the chief; does nothing on other tasks.

    The SavedModel has two endpoints. Both compute `model(inputs, training=False)`:

    - `serving_default` takes tensors by the model's input names and returns them by its output
      names: the keys of a dict, the names of a functional model's `keras.Input`s and output
      layers; for unnamed ones the argument's name and `output_0`, `output_1`, ...
    - `serve` takes and returns the structures that the model itself takes and returns.

    The call contains no collective: no task waits for another.

    Args:
        model: a built Keras model with plain variables, such as after `tfmw.fit`.
        path: the directory to write; an existing export is replaced. URLs are refused: export
            to a local directory, and copy that to a bucket with `tfmw.storage.upload`.
        pass_through: inputs that `serving_default` returns unchanged, by name: with
            `{"key": tf.TensorSpec([None], tf.string)}` it returns each prediction beside the key
            of its example.
        input_signature: the specs of the model's one argument, a structure of `tf.TensorSpec`,
            whose first dimension is the batch (exported as unknown). By default the shapes that
            the model was built with. A subclassed model does not store the types of its inputs;
            their default is its float type.
        tables: format of tables on parameter servers; it has no effect on a model without tables.
            "whole": as variables, for machines with enough memory. "sharded": as files, in which
            TensorFlow looks up the rows that an input needs, for other machines.
        cluster: the cluster whose chief writes; by default the one that this process joined.

    Returns:
        On the chief the path that was written, on other tasks None.

    Raises:
        UsageError: `model` is not a built Keras model, its inputs are unknown, or two inputs or two
            outputs would have the same name; `tables` is neither value; TensorFlow could not load
            from `path`, or `path` exists and is not a SavedModel (it is not changed).
        TfmwError: a layer reads all rows of a table, which is to be sharded.
    """
    if not isinstance(model, keras.Model):
        raise UsageError(f"export takes a Keras model; received: {type(model).__name__}.")
    require_choice("tables", tables, ("whole", "sharded"))
    if not (cluster or membership.current_cluster()).is_chief:
        return None
    check_path(path)
    target = _normalize(path)
    specs = _input_specs(model, input_signature)
    parent, name = os.path.split(target)
    every = placement.all_variables(model)
    sharded = tables == "sharded"
    exported = tables_in_files(every, model.variables) if sharded else whole_tables(every)
    with exported as (asset, write_tables):
        archive = _archive(model, specs, dict(pass_through or {}))
        if asset is not None:
            track_asset(archive, asset)
        directories.clean_up(parent, re.compile(re.escape(name)))
        with directories.atomic_directory(target) as temporary:
            archive.write_out(temporary, verbose=False)
            write_tables(temporary)
            _forget_cluster(temporary)
            _write_manifest(temporary)
    return target


def check_path(path: str | os.PathLike[str]) -> str:
    """Checks before the training whether `export` could write `path` after it.

    Returns:
        The absolute path: the training may change the working directory.

    Raises:
        UsageError: `path` exists and is neither a SavedModel nor an empty directory; no directory
            can be created there; or TensorFlow could not load a SavedModel from there.
    """
    refuse_writing(path, "export")
    if directories.is_pattern(os.fspath(path)):
        raise UsageError(
            f"no export is written to {os.fspath(path)!r}: tf.saved_model.load takes a backslash, "
            "and brackets with something in them, for a pattern and would find no variables "
            "there. Name a directory without them."
        )
    target = _normalize(path)
    directories.check_name(target)
    try:
        if membership.current_cluster().is_chief:
            directories.check_creatable(target)
        if not os.path.exists(target):
            return target
    except (OSError, ValueError) as e:
        raise UsageError(
            f"no export can be written to {target!r} ({first_line(e)}): name a directory "
            "that this process may create."
        ) from e
    if os.path.isdir(target):
        entries = os.listdir(target)
        if not entries or "saved_model.pb" in entries:
            return target
    raise UsageError(
        f"{target} exists and is not a SavedModel: an export would delete its files; "
        "name another directory, or remove this one."
    )


def verify_export(path: str | os.PathLike[str]) -> list[str]:
    """Compares the files of an export with the checksums of its manifest.

    Args:
        path: a directory that `export` wrote. Files added since then are ignored.

    Returns:
        One sentence for each problem; none if every file is intact.
    """
    directory = _normalize(path)
    if not os.path.isdir(directory):
        return [f"{directory} is not a directory."]
    manifest = os.path.join(directory, MANIFEST)
    if not os.path.exists(manifest):
        return [f"{directory} has no {MANIFEST}: tfmw.export did not write it."]
    try:
        with open(manifest, encoding="utf-8") as file:
            content = json.load(file)
        if content["format"] != _FORMAT:
            return [f"{manifest} has format {content['format']}; this tfmw reads {_FORMAT}."]
        expected = {
            str(name): (str(entry["sha256"]), int(entry["bytes"]))
            for name, entry in content["files"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{manifest} is damaged: {error!r}."]
    problems = []
    for name, (sha256, size) in sorted(expected.items()):
        file_path = os.path.join(directory, name)
        if not os.path.exists(file_path):
            problems.append(f"{name} is missing.")
        elif (actual_size := os.path.getsize(file_path)) != size:
            problems.append(f"{name} has {actual_size} bytes; {size} were written.")
        elif directories.sha256(file_path) != sha256:
            problems.append(f"{name} is damaged: its SHA-256 is not the one that was written.")
    return problems


# The inputs and outputs of the model, and their names.


def _input_specs(model: keras.Model, input_signature: Any) -> Any:
    """The structure of `tf.TensorSpec` that `model` takes as its one argument, every leaf named."""
    if not model.built:
        raise UsageError(
            f"{model.name!r} cannot be exported before it is built: it has no weights yet. "
            "Train it, or call it once on a batch."
        )
    if input_signature is None:
        inputs = getattr(model, "inputs", None)  # inputs of a functional or Sequential model
        if inputs is None:
            input_signature = _remembered_inputs(model)
        else:
            input_signature = tf.nest.map_structure(
                lambda x: tf.TensorSpec(x.shape, x.dtype, x.name),
                inputs[0] if isinstance(model, keras.Sequential) else model.input,
            )
    only = len(tf.nest.flatten(input_signature)) == 1
    named = [
        tf.TensorSpec(
            tf.TensorShape([None]).concatenate(spec.shape[1:]),
            spec.dtype,
            # The name of a leaf inside a dict is its key, as for callers of the model.
            ("_".join(keys) if keys else None)
            or spec.name
            or (_argument_name(model) if only else f"input_{index}"),
        )
        for index, (keys, spec) in enumerate(_leaves(input_signature))
    ]
    return tf.nest.pack_sequence_as(input_signature, named)


def _remembered_inputs(model: keras.Model) -> Any:
    """Specs of the shapes that a subclassed model was built with, of its float type."""
    shapes = (model.get_build_config() or {}).get("input_shape")
    if shapes is None:
        raise UsageError(
            f"the inputs of {model.name!r} are not known: its build() takes several of them or "
            "hides them. Pass input_signature=, for example "
            "input_signature=tf.TensorSpec([None, 8, 8, 1], tf.float32)."
        )

    def specs(shape: Any) -> Any:
        if isinstance(shape, Mapping):
            return {key: specs(value) for key, value in shape.items()}
        if all(size is None or isinstance(size, int) for size in shape):
            return tf.TensorSpec(shape, model.variable_dtype)
        return [specs(item) for item in shape]

    return specs(shapes)


def _argument_name(model: keras.Model) -> str:
    """The name of the first argument of `call`: "inputs", "x", ..."""
    parameters = inspect.signature(model.call).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    return positional[0] if positional else "inputs"


def _output_names(model: keras.Model, count: int) -> list[str]:
    names = getattr(model, "output_names", None)
    if names is None and isinstance(model, keras.Sequential):
        names = [model.layers[-1].name]
    if names is None or len(names) != count:
        return [f"output_{index}" for index in range(count)]
    return list(names)


def _leaves(structure: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields (keys of the dicts above a leaf, the leaf), in the order of `tf.nest.flatten`."""
    if isinstance(structure, Mapping):
        for key in sorted(structure):
            yield from _leaves(structure[key], (*keys, str(key)))
    elif isinstance(structure, (list, tuple)) and not isinstance(structure, tf.TensorShape):
        for index, item in enumerate(structure):
            yield from _leaves(item, (*keys, str(index)) if keys else ())
    else:
        yield keys, structure


def _by_name(names: list[str], values: list[Any], what: str, model: keras.Model) -> dict[str, Any]:
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise UsageError(
            f"two {what} of {model.name!r} have the same name, {duplicates[0]!r}. "
            "Give each its own: keras.Input(name=...), a layer's name=..., a key of a dict, "
            "or another name in pass_through."
        )
    return dict(zip(names, values, strict=True))


# The two endpoints.


def _archive(
    model: keras.Model, specs: Any, pass_through: dict[str, tf.TensorSpec]
) -> keras.export.ExportArchive:
    """An archive with `serve` and `serving_default`; see `export`."""
    flat_specs = tf.nest.flatten(specs)
    names = [spec.name for spec in flat_specs]
    named_specs = _by_name(
        [*names, *pass_through],
        [
            *flat_specs,
            *(tf.TensorSpec(s.shape, s.dtype, name) for name, s in pass_through.items()),
        ],
        "inputs",
        model,
    )

    def serve(inputs: Any) -> Any:
        return model(inputs, training=False)

    def serving_default(inputs: Any) -> dict[str, tf.Tensor]:
        by_name = inputs if isinstance(inputs, Mapping) else {names[0]: inputs}
        outputs = serve(tf.nest.pack_sequence_as(specs, [by_name[name] for name in names]))
        leaves = list(_leaves(outputs))
        given = iter(_output_names(model, sum(not keys for keys, _ in leaves)))
        return _by_name(
            [*("_".join(keys) if keys else next(given) for keys, _ in leaves), *pass_through],
            [
                *(leaf for _, leaf in leaves),
                *(tf.identity(by_name[name]) for name in pass_through),
            ],
            "outputs",
            model,
        )

    # A single input is passed without a name, so that `TFSMLayer(...)(images)` works.
    only = named_specs[names[0]] if len(named_specs) == 1 else None
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("serve", serve, [specs])
    archive.add_endpoint(
        "serving_default", serving_default, [named_specs if only is None else only]
    )
    return archive


def _forget_cluster(directory: str) -> None:
    """Removes the description of this process's cluster from a SavedModel.

    TensorFlow writes its session's configuration into every call of a function: the devices of
    the job, the leader of its collectives, the health checks between its tasks.
    """
    path = os.path.join(directory, "saved_model.pb")
    with open(path, "rb") as file:
        content = file.read()
    saved_model = saved_model_pb2.SavedModel.FromString(content)
    for meta_graph in saved_model.meta_graphs:
        functions = meta_graph.graph_def.library.function
        bodies = (function.node_def for function in functions)
        for node in itertools.chain(meta_graph.graph_def.node, *bodies):
            if "/job:" in node.device:
                node.device = ""
            if "config_proto" in node.attr:
                config = tf.compat.v1.ConfigProto.FromString(node.attr["config_proto"].s)
                config.ClearField("device_filters")
                config.ClearField("cluster_def")
                config.experimental.ClearField("collective_group_leader")
                config.experimental.ClearField("coordination_config")
                node.attr["config_proto"].s = config.SerializeToString(deterministic=True)
        for node in meta_graph.object_graph_def.nodes:
            if node.HasField("variable"):
                node.variable.device = ""
    cleaned = saved_model.SerializeToString(deterministic=True)
    if cleaned != content:
        with open(path, "wb") as file:
            file.write(cleaned)
        # The fingerprint is that of the unchanged file; TensorFlow does not need one.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(directory, "fingerprint.pb"))


# Files.


def _normalize(path: str | os.PathLike[str]) -> str:
    return os.path.abspath(os.path.expanduser(disk.without_scheme(os.fspath(path))))


def _write_manifest(directory: str) -> None:
    files = {}
    for parent, _, names in os.walk(directory):
        for path in (os.path.join(parent, name) for name in names):
            entry = {"sha256": directories.sha256(path), "bytes": os.path.getsize(path)}
            files[path[len(directory) :].lstrip("/")] = entry
    content = {"format": _FORMAT, "files": dict(sorted(files.items()))}
    with open(os.path.join(directory, MANIFEST), "w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=1) + "\n")
