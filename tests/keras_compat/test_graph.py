"""Walks over deep graphs and graphs with many paths: iterative, each operation visited once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

from tfmw.compat import assigned_weights, graph, metric_variables, parameter_servers
from tfmw.compat.dataflow import walk
from tfmw.compat.dataflow.walk import Dataflow
from tfmw.data.reshuffles import constant_of
from tfmw.train.parameter_server.lookups import ops_between

DEEP = 5000
WEIGHT = tf.Variable(1.0)
METRIC = keras.Variable(0.0)


def in_graph(look: Callable[[Any], Any]) -> Any:
    """Result of `look` on a batch [None, 3] in a graph, in a replica's context."""
    found = []

    def step(x: Any) -> Any:
        found.append(look(x))
        return x

    @tf.function(autograph=False)
    def traced(x: Any) -> Any:
        return tf.distribute.get_strategy().run(step, args=(x,))

    traced.get_concrete_function(tf.TensorSpec([None, 3]))
    return found[0]


def chain(tensor: Any, op: str, *others: Any) -> Any:
    """Thousands of operations: the first input of each is the one before. Quicker than tracing."""
    definition, dtype = tf.compat.v1.GraphDef(), tensor.dtype.as_datatype_enum
    for i in range(DEEP):
        inputs = [f"n{i - 1}" if i else "given", *(f"other{k}" for k in range(len(others)))]
        definition.node.add(name=f"n{i}", op=op, input=inputs).attr["T"].type = dtype
    given = {"given:0": tensor} | {f"other{k}:0": other for k, other in enumerate(others)}
    return tf.graph_util.import_graph_def(definition, given, [f"n{DEEP - 1}:0"])[0]


@pytest.mark.nightly
def test_walks_over_chains_of_thousands_of_operations() -> None:
    def look(x: Any) -> dict[str, Any]:
        deep, mean = chain(x, "Sin"), chain(tf.reduce_mean(x), "Neg")
        shape = chain(tf.cast(tf.shape(x)[0], tf.float32), "Neg")
        two = chain(tf.constant(2.0), "StopGradient")
        added = chain(METRIC.value, "AddV2", WEIGHT.read_value())
        total = assigned_weights.increment(METRIC, added * 2.0 + x[0, 0])
        (again,) = graph.function_of([deep], [x])([tf.identity(x)])  # type: ignore[misc]
        flows = Dataflow(x)
        return {
            "mean": flows.of(mean)[:3],
            "sum": flows.of(tf.reduce_sum(deep) * WEIGHT)[:3],
            "shape": flows.of(shape)[:3],
            "number": flows.of(two)[:3],
            "metric": metric_variables.combination(METRIC, added),
            "increment": total is not None and total[1].dtype,
            "plain": ops_between([x], deep) is not None,
            "copied": len(graph.ancestors([again])),
        }

    assert in_graph(look) == {
        "mean": ("reduced", (), 0),
        "sum": ("reduced", (), 1),
        "shape": ("size", (), 1),
        "number": ("fixed", (), 0),
        "metric": "sum",
        "increment": tf.float32,
        "plain": True,
        "copied": DEEP + 2,
    }


def test_function_with_thousands_of_operations_is_one_op() -> None:
    op = parameter_servers.TracedOp(lambda x: chain(x, "Neg"), tf.TensorSpec([]))
    assert op.uses == [True]


def test_seed_behind_thousands_of_nodes_isconstant_of() -> None:
    nodes = {"n0": node("Const", [], value=7)}
    nodes |= {f"n{i}": node("Identity", [f"n{i - 1}"]) for i in range(1, DEEP)}
    assert constant_of(f"n{DEEP - 1}", nodes) == 7
    assert constant_of("n0:output:0", nodes) == 7
    assert constant_of("other", nodes) is None


def node(op: str, inputs: list[str], value: int | None = None) -> Any:
    made = tf.compat.v1.NodeDef(op=op, input=inputs)
    if value is not None:
        made.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, tf.int64, []))
    return made


def test_operations_with_many_paths_are_visited_once(monkeypatch: pytest.MonkeyPatch) -> None:
    visited: list[str] = []
    all_ancestors = graph.ancestors

    def ancestors(*arguments: Any, **options: Any) -> Any:
        found = all_ancestors(*arguments, **options)
        visited.extend(op.name for op in found)
        return found

    monkeypatch.setattr(walk, "ancestors", ancestors)

    def look(x: Any) -> tuple[set[str], int]:
        loss, kinds, flows = tf.reduce_mean(x), set(), Dataflow(x)
        for _ in range(200):
            loss = loss + loss * WEIGHT  # 2 ** 200 paths
            kinds.add(flows.of(loss).kind)
        return kinds, len(x.graph.get_operations())

    kinds, operations = in_graph(look)
    assert kinds == {"reduced"}
    assert len(visited) <= operations


def test_order_of_inputs_of_any_graph() -> None:
    uses = {"a": ["b", "c"], "b": ["d"], "c": ["b", "d"], "d": []}
    assert graph.inputs_first(["a"], uses.__getitem__) == ["d", "b", "c", "a"]
    circle = {"a": ["b"], "b": ["a"]}
    assert set(graph.inputs_first(["a"], circle.__getitem__)) == {"a", "b"}
    assert graph.inputs_first([DEEP], lambda n: [n - 1] if n else []) == list(range(DEEP + 1))


@pytest.mark.parametrize(
    ("made", "is_function"),
    [
        (lambda a, b: a * 2 + tf.exp(b), True),
        (lambda a, b: tf.stack([a, tf.constant(1.0)])[0] - b, True),
        (lambda a, b: a * WEIGHT + b, False),  # may have changed when the function is called
        (lambda a, b: a + tf.random.uniform([]), False),
        (lambda a, b: a + tf.reduce_sum(b.graph.inputs[0]), False),
    ],
)
def test_functions_of_tensors_are_called_in_another_graph(made: Any, is_function: bool) -> None:
    functions: list[Any] = []

    @tf.function
    def first(x: Any) -> Any:
        a, b = tf.reduce_sum(x), tf.reduce_max(x)
        value = made(a, b)
        assert graph.depends_on(value, a)
        functions.append(graph.function_of([value], [a, b]))
        return value

    first.get_concrete_function(tf.TensorSpec([None]))
    (function,) = functions
    assert (function is not None) == is_function
    if is_function:
        again = tf.function(lambda a, b: function([a, b])[0])
        assert float(again(tf.constant(3.0), tf.constant(0.5))) == pytest.approx(
            float(made(tf.constant(3.0), tf.constant(0.5)))
        )


def test_tensors_taken_as_given_are_not_passed() -> None:
    def look(x: Any) -> list[str]:
        middle = tf.sin(x)
        end = tf.cos(middle) + middle
        return [op.type for op in graph.ancestors([end], stop=lambda t: t is middle)]

    assert in_graph(look) == ["Cos", "AddV2"]
