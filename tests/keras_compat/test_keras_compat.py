"""Private names of Keras and TensorFlow stand in one module, and all of them still exist."""

from __future__ import annotations

import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.keras_compat.private_names import missing_names
from tfmw import UsageError
from tfmw.compat import (
    datasets,
    metric_variables,
    model_methods,
    models,
    parameter_servers,
    table_variables,
)

ROOT = Path(__file__).resolve().parents[2]

PRIVATE = re.compile(
    r"\bkeras\.src\b|\btensorflow\.python\b|\btf_keras\b"
    r"|(?<!self)(?<!cls)(?<!\bsuper\(\))\._(distribute_strategy|distribution_strategy|compile_loss"
    r"|compile_metrics|loss_tracker|trainable_variables|var_key|flatten_layers|seed_generators"
    r"|symbolic_build|direct_assign|inputs\(\)|map_func|batch_size\b|seed2?\b|context_handle)"
)


def test_every_private_name_exists() -> None:
    assert missing_names() == []


def test_missing_private_name_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("keras.src.losses.loss.apply_mask")
    assert missing_names() == ["keras.src.losses.loss.apply_mask"]


def test_setting_the_seed_again_is_detected() -> None:
    tf.random.set_seed(1)
    before = datasets.source_of_seeds()
    tf.random.set_seed(1)
    assert before is not None
    assert datasets.source_of_seeds() is not before


def test_private_names_are_only_in_keras_compat() -> None:
    found = [
        f"{path.name}:{number}: {line.strip()}"
        for path in sorted((ROOT / "tfmw").rglob("*.py"))
        if path.parent.name != "compat"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for code in [line.split("#")[0]]
        if (re.match(r"\s*(from|import) (keras\.src|tensorflow\.python)", code))
        or (PRIVATE.search(code) and not re.search(r"\b(self|cls|split|step)\._", code))
    ]
    # A path in a comment or docstring says where a fact comes from; it imports nothing.
    found = [f for f in found if not re.search(r"tensorflow/python|\(tensorflow/", f)]
    assert found == []


def test_the_search_finds_private_names() -> None:
    for line in (
        "from keras.src import losses",
        "model._distribute_strategy = None",
        "optimizer._var_key(v)",
        "import tensorflow.python.eager",
    ):
        assert PRIVATE.search(line), line


@pytest.mark.parametrize(
    ("update", "expected"),
    [
        (lambda v, x: v + x, "sum"),
        (lambda v, x: x + v, "sum"),
        (lambda v, x: v - x, "sum"),
        (lambda v, x: v + x + x, "sum"),
        (lambda v, x: tf.where(x > 0, v + x, v), "sum"),
        (lambda v, x: tf.maximum(v, x), "max"),
        (lambda v, x: tf.minimum(x, v), "min"),
        (lambda v, x: tf.identity(v), "unchanged"),
        (lambda v, x: x, None),
        (lambda v, x: x - v, None),
        (lambda v, x: 0.9 * v + x, None),
        (lambda v, x: v + v, None),
        (lambda v, x: v + v * x, None),
        (lambda v, x: tf.maximum(v + x, x), None),
    ],
)
def test_combination_of_metric_variables(update, expected) -> None:
    variable = keras.Variable(np.float32(1))
    seen: list[str | None] = []

    @tf.function(autograph=False)
    def step(x):
        def on_replica(x):
            native = models.native(variable)
            seen.append(metric_variables.combination(variable, update(native.read_value(), x)))
            return x

        return tf.distribute.get_strategy().run(on_replica, args=(x,))

    step.get_concrete_function(tf.TensorSpec([]))
    assert seen == [expected]


@pytest.mark.parametrize(
    "updates", [[lambda v, x: x], [tf.maximum, tf.add], [tf.add, tf.identity, tf.minimum]]
)
def test_updates_that_cannot_be_combined_are_refused(updates) -> None:
    variable = keras.Variable(np.float32(1), name="last")
    combined: dict[int, str] = {}

    @tf.function(autograph=False)
    def step(x):
        for update in updates:
            arguments = [models.native(variable).read_value(), x]
            value = update(*arguments[: 1 if update is tf.identity else 2])
            metric_variables.note_combination(combined, variable, value)

    with pytest.raises(UsageError, match="updates its variable 'last' neither by addition nor"):
        step.get_concrete_function(tf.TensorSpec([]))


@pytest.mark.parametrize("kind", ["Adagrad", "Adam", "Ftrl"])
def test_variable_whose_rows_are_elsewhere_is_named_for_its_slots(kind: str) -> None:
    made: list[tuple[str, object]] = []

    def make(new: table_variables.NewVariable) -> parameter_servers.RemoteRows | None:
        made.append((new.path, new.slot_of))
        if new.path != "table":
            return None
        return parameter_servers.RemoteRows(
            "elsewhere", new.shape, new.dtype, tf.identity, tf.no_op
        )

    table_variables.make_variables_by(make)
    try:
        variables = [keras.Variable(np.zeros(2), name="before")]
        variables += [keras.Variable("zeros", shape=[4, 2], name="table")]
        variables += [keras.Variable(np.zeros(2), name="after")]
        del made[:]
        getattr(keras.optimizers, kind)(0.1).build(variables)
    finally:
        table_variables.make_variables_by(lambda new: None)
    slots = [path for path, slot_of in made if slot_of is variables[1]]
    assert [path.rpartition("_")[2] for path in slots] == {
        "Adagrad": ["accumulator"],
        "Adam": ["momentum", "velocity"],
        "Ftrl": ["accumulator", "linear"],
    }[kind]


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # Keras, when it saves
def test_a_model_is_saved_where_a_symbolic_link_points(tmp_path):
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "model.keras", tmp_path / "latest.keras"
    link.symlink_to(target)
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
    save = model_methods._whole(keras.Model.save, is_chief=True, after_export=lambda: None)
    for _ in range(2):  # of a new file, and over it
        save(model, link)
        assert link.is_symlink()
        assert keras.saving.load_model(target).count_params() == 8
    assert [file.name for file in target.parent.iterdir()] == ["model.keras"]
