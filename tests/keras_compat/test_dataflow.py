"""Dependence of values on the examples of a batch, derived from their graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import ops

from tfmw.compat.dataflow.flow import Flow
from tfmw.compat.dataflow.walk import Dataflow
from tfmw.compat.losses import ReplicaWeight
from tfmw.compat.metric_variables import increment_kind

FEATURES = 5
WEIGHTS = tf.Variable(tf.ones([FEATURES]))
KERNEL = tf.Variable(tf.ones([FEATURES, 3]))
IMAGE_KERNEL = tf.Variable(tf.ones([3, 3, 1, 2]))
TABLE = tf.Variable(tf.ones([9, 3]))
CELL = keras.layers.LSTM(3, return_sequences=True)


def flow_of(function: Callable[[Any], Any], *shape: int | None, spec: Any = None) -> Flow:
    """The flow of a function of a batch [None, *shape], or of another spec."""
    found = []

    @tf.function(autograph=False)
    def step(x: Any) -> Any:
        value = function(x)
        found.append(Dataflow(x).of(value))
        return x

    step.get_concrete_function(spec or tf.TensorSpec([None, *(shape or (FEATURES,))]))
    return found[0]


def number_of(x: Any) -> Any:
    return ops.cast(ops.shape(x)[0], "float32")


def ones(x: Any) -> Any:
    return tf.ones([tf.shape(x)[0], FEATURES])


def normalized(x: Any) -> Any:
    return x / ops.norm(x, axis=1, keepdims=True)


def noisy_sum(x: Any) -> Any:
    return tf.reduce_sum(x + tf.random.normal(tf.shape(x)))


def accumulated(x: Any) -> Any:
    total = ops.mean(x)
    for _ in range(50):
        total = total + 0.1 * ops.mean(ops.square(x))
    return total


def as_map(x: Any) -> Any:
    return tf.map_fn(lambda row: tf.reduce_sum(row) * row, x)


def in_halves(x: Any) -> Any:
    both = ops.concatenate([x, 2 * x], axis=0)
    rows = ops.shape(x)[0]
    return ops.mean(ops.square(both[:rows] - both[rows:]))


def cross_entropy(scores: Any, x: Any) -> Any:
    return keras.losses.sparse_categorical_crossentropy(
        ops.arange(ops.shape(x)[0]), scores, from_logits=True
    )


def penalized(x: Any) -> Any:
    """A gradient penalty."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        score = tf.nn.leaky_relu(x @ KERNEL.value()) * 2.0 + 0.5
    grads = tape.gradient(score, [x])[0]
    return tf.reduce_mean((tf.sqrt(tf.reduce_sum(tf.square(grads), axis=1)) - 1.0) ** 2)


def penalized_through_padding(x: Any) -> Any:
    """Its gradient is a slice, of a size that is known while the step runs."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        score = tf.pad(x, [[0, 0], [1, 2]]) ** 2
    grads = tape.gradient(score, [x])[0]
    return tf.reduce_mean(tf.reduce_sum(tf.square(grads), axis=1))


def with_noisy_labels(x: Any) -> Any:
    """A loss of generated and real examples as in a GAN, with noise of the shape of both."""
    both = tf.concat([2 * x, x], axis=0)
    labels = tf.concat([tf.ones_like(x[:, :1]), tf.zeros_like(x[:, :1])], axis=0)
    labels += 0.05 * tf.random.uniform(tf.shape(labels))
    labels += tf.broadcast_to(0.1, tf.shape(labels)) + tf.fill(tf.shape(labels), 0.1)
    return tf.reduce_mean((both @ KERNEL.value() - labels) ** 2)


def counts(x: Any, **columns: int) -> Any:
    """Counts of each example; as many columns as its largest value and the limits require."""
    return tf.cast(tf.math.bincount(tf.cast(x, tf.int32), axis=-1, **columns), tf.float32)


def chosen(x: Any) -> Any:
    """Probability of one class for each example, as of the actions in a policy gradient."""
    places = tf.range(tf.shape(x)[0])
    labels = tf.argmax(x, axis=1, output_type=tf.int32)
    return tf.reduce_mean(tf.gather_nd(x, tf.stack([places, labels], axis=1)))


def generated(x: Any) -> Any:
    noise = tf.random.normal([tf.shape(x)[0], FEATURES])
    fakes = noise * WEIGHTS
    both = tf.concat([fakes, x], axis=0)
    labels = tf.concat([tf.ones([tf.shape(x)[0], 1]), tf.zeros([tf.shape(x)[0], 1])], axis=0)
    return tf.reduce_mean(tf.square(both - labels))


def conditional(x: Any) -> Any:
    return tf.cond(WEIGHTS[0] > 0, lambda: tf.reduce_mean(x), lambda: tf.reduce_mean(2 * x))


@tf.function
def inner(x: Any) -> Any:
    return tf.reduce_mean(tf.square(x)) + tf.reduce_sum(WEIGHTS)


def nearest_code(x: Any) -> Any:
    """Nearest row of a table for each row, as in VQ-VAE."""
    flat = tf.reshape(x @ KERNEL, [-1, 3])
    distances = (
        tf.reduce_sum(flat**2, axis=1, keepdims=True)
        + tf.reduce_sum(TABLE**2, axis=1)
        - 2 * tf.matmul(flat, TABLE, transpose_b=True)
    )
    chosen = tf.one_hot(tf.argmin(distances, axis=1), 9)
    codes = tf.reshape(tf.matmul(chosen, TABLE), tf.shape(x @ KERNEL))
    return tf.reduce_mean((tf.stop_gradient(codes) - x @ KERNEL) ** 2)


def looped(x: Any, rows: Any = None, other: Any = 1.0) -> Any:
    """A sum over examples, one in each iteration."""
    size = tf.shape(x)[0] if rows is None else rows
    body = lambda i, total: (i + 1, total + tf.reduce_sum(tf.square(x[i]) * other))  # noqa: E731
    _, total = tf.while_loop(lambda i, total: i < size, body, (0, 0.0))
    return total / number_of(x)


@tf.function
def in_autograph(x: Any) -> Any:
    out = tf.TensorArray(tf.float32, tf.shape(x)[0])
    for i in tf.range(tf.shape(x)[0]):
        out = out.write(i, tf.reduce_sum(x[i]))
    return tf.reduce_mean(out.stack())


def if_finite(x: Any) -> Any:
    loss = tf.reduce_mean(x)
    loss = tf.cond(tf.math.is_finite(loss), lambda: loss, lambda: 0.0)
    return tf.where(tf.math.is_nan(loss), tf.zeros_like(loss), loss)


MEANS: list[Any] = [
    looped,
    in_autograph,
    if_finite,
    lambda x: tf.reduce_mean(tf.vectorized_map(lambda row: tf.tanh(row) * tf.reduce_sum(row), x)),
    lambda x: tf.scatter_nd(tf.cast(x[:, :1], tf.int32), x / number_of(x), [9, FEATURES]),
    lambda x: tf.math.unsorted_segment_sum(x / number_of(x), tf.cast(x[:, 0], tf.int32), 9),
    lambda x: ops.mean(x),
    lambda x: ops.mean(ops.sum(x, axis=1)),
    lambda x: -0.5 * ops.mean(x) + 2 * ops.mean(ops.exp(x)),
    lambda x: ops.sum(x) / number_of(x),
    lambda x: ops.sum(x / number_of(x)),
    lambda x: ops.sum(x) * (1.0 / number_of(x)),
    lambda x: tf.math.divide_no_nan(ops.sum(x), ops.cast(tf.size(x), "float32")),
    lambda x: ops.sum(x) / (number_of(x) + 1e-7),
    lambda x: ops.sum(ops.mean(x, axis=0)),
    lambda x: 1 - ops.mean(x),
    lambda x: ops.mean(ops.mean(ops.square(x), axis=1) + ops.mean(x)),
    lambda x: ops.mean(x) + ops.sum(ops.square(WEIGHTS)),
    lambda x: ops.mean(x @ KERNEL),
    lambda x: ops.mean(ops.einsum("ij,jk->ik", x, KERNEL)),
    lambda x: ops.mean(ops.einsum("bi,bi->b", x, 2 * x)),
    lambda x: ops.mean(ops.softmax(x)),
    lambda x: tf.reduce_mean(tf.linalg.diag_part(x @ tf.transpose(x))),
    lambda x: ops.mean(ops.reshape(x, (-1,))),
    lambda x: ops.mean(ops.reshape(x, (-1, FEATURES, 1)) * WEIGHTS[:, None]),
    lambda x: ops.mean(ops.transpose(x) * WEIGHTS[:, None]),
    lambda x: ops.mean(ops.repeat(x, 3, axis=0)),
    lambda x: ops.mean(tf.tile(x[:, None], [1, 4, 1]) - x[:, None]),
    lambda x: ops.mean(x[:, 1:3] - x[:, :2]),
    lambda x: ops.mean(ops.concatenate([x, x], axis=1)),
    lambda x: ops.mean(ops.stack([x, 2 * x], axis=1)),
    lambda x: ops.mean(ops.logsumexp(x, axis=1)),
    lambda x: ops.mean(ops.take(TABLE, ops.argmax(x, axis=1), axis=0)),
    lambda x: ops.mean(ops.take_along_axis(x, ops.argmax(x, axis=1)[:, None], axis=1)),
    lambda x: ops.mean(keras.random.normal(ops.shape(x)) * x),
    lambda x: ops.mean(ops.where(x > 0, x, 0.0)),
    lambda x: ops.mean(ops.cumsum(x, axis=1)),
    lambda x: ops.mean(counts(x, minlength=4, maxlength=4)),
    lambda x: ops.mean(tf.math.unsorted_segment_mean(tf.transpose(x), [0, 0, 1, 1, 2], 3)),
    lambda x: ops.mean(normalized(x)),
    lambda x: tf.reduce_mean(tf.nn.dropout(x, 0.5)),
    accumulated,
    in_halves,
    lambda x: ops.mean(as_map(x)),
    lambda x: ops.mean(ops.softmax(ops.expand_dims(x, -1) * WEIGHTS, axis=1)),
    lambda x: ops.mean(ops.softmax(x / 4.0)),
    lambda x: ops.mean(tf.reshape(tf.sparse.reduce_sum(tf.sparse.from_dense(x), 1), [-1, 1])),
    penalized,
    penalized_through_padding,
    with_noisy_labels,
    chosen,
    generated,
    conditional,
    inner,
    nearest_code,
]
SUMS: list[Any] = [
    keras.regularizers.L1L2(0.01, 0.02),
    lambda x: looped(x) * number_of(x),
    lambda x: ops.sum(x),
    lambda x: 0.1 * ops.sum(ops.square(x)),
    lambda x: ops.sum(ops.mean(x, axis=1)),
    lambda x: ops.sum(x) / 8.0,
    lambda x: ops.sum(x) * WEIGHTS[0],
    lambda x: ops.sum(ops.sum(x, axis=0)),
    lambda x: ops.sum(x, axis=0),
    lambda x: ops.transpose(x) @ x,
    lambda x: tf.nn.l2_loss(x),
    lambda x: ops.sum(tf.boolean_mask(x, x[:, 0] > 0)),
    lambda x: ops.segment_sum(x, ops.argmax(x, axis=1), num_segments=FEATURES),
    lambda x: tf.stack([ops.sum(x), number_of(x)]),
    lambda x: tf.sparse.reduce_sum(tf.sparse.from_dense(x)),
    lambda x: tf.sparse.reduce_sum(tf.sparse.from_dense(x), axis=-2),
    lambda x: noisy_sum(tf.boolean_mask(x, x[:, 0] > 0)),
]
COMPARED: list[Any] = [
    lambda x: looped(x, 3),
    lambda x: looped(x, tf.shape(x)[0] // 2),
    lambda x: looped(x, other=x),
    lambda x: ops.mean(tf.vectorized_map(lambda row: tf.reduce_mean((row - x) ** 2), x)),
    lambda x: ops.mean(tf.gather(x, tf.where(x[:, 0] > 0, tf.range(tf.shape(x)[0]), 0))),
    lambda x: ops.mean(x @ ops.transpose(x)),
    lambda x: ops.mean(ops.matmul(normalized(x), ops.transpose(normalized(x)))),
    lambda x: ops.mean(ops.einsum("id,jd->ij", x, x)),
    lambda x: ops.mean(ops.tensordot(x, x, axes=[[1], [1]])),
    lambda x: ops.mean(ops.square(x[:, None] - x[None])),
    lambda x: ops.mean(ops.mean(x, axis=1) - ops.mean(x, axis=1, keepdims=True)),
    lambda x: ops.mean(cross_entropy(x @ ops.transpose(x), x)),
    lambda x: ops.mean(ops.softmax(x, axis=0)),
    lambda x: ops.max(x),
    lambda x: ops.mean(counts(x, minlength=3, maxlength=4)),
    lambda x: ops.mean(ops.cumsum(x, axis=0)),
    lambda x: ops.mean(ops.flip(x, axis=0) * x),
    lambda x: ops.mean(ops.roll(x, 1, axis=0) * x),
    lambda x: ops.mean(tf.slice(x, [1, 0], tf.shape(x) - [1, 0]) ** 2),
    lambda x: ops.mean(tf.slice(tf.concat([x, x], 0), [0, 0], tf.shape(x)) * x[:1]),
    lambda x: ops.mean(tf.gather(x, tf.random.shuffle(tf.range(tf.shape(x)[0])))),
    lambda x: ops.mean(x[0] - x),
    lambda x: tf.cond(ops.max(x) > 0, lambda: ops.mean(x), lambda: ops.mean(2 * x)),
    lambda x: ops.mean(x[1:] - x[:-1]),
    lambda x: ops.mean(ops.sort(x, axis=0)),
    lambda x: ops.mean(tf.tile(x, [tf.shape(x)[0], 1]) - tf.repeat(x, tf.shape(x)[0], axis=0)),
    lambda x: tf.sparse.reduce_max(tf.sparse.from_dense(x), axis=0),
]
NONLINEAR: list[Any] = [
    lambda x: ops.sqrt(ops.mean(x)),
    lambda x: ops.sum(x) / ops.sum(ops.abs(x)),
    lambda x: ops.mean(ops.square(x - ops.mean(x, axis=0))),
    lambda x: ops.sum(x) + ops.mean(x),
    lambda x: tf.where(WEIGHTS[0] > 0, ops.sum(x), ops.mean(x)),
    lambda x: 1 - ops.sum(x),
    lambda x: ops.std(x),
    lambda x: ops.mean(tf.boolean_mask(x, x[:, 0] > 0)),
    lambda x: ops.mean(x) * ops.mean(x),
    lambda x: tf.cond(ops.mean(x) > 0, lambda: ops.mean(x), lambda: ops.mean(2 * x)),
    lambda x: tf.cond(ops.mean(x) > 0, lambda: ops.sqrt(ops.mean(x)), lambda: 0.0),
]


@pytest.mark.parametrize("function", MEANS)
def test_means(function: Any) -> None:
    flow = flow_of(function)
    assert (flow.kind, flow.degree) == ("reduced", 0), flow


@pytest.mark.parametrize("function", SUMS)
def test_sums(function: Any) -> None:
    flow = flow_of(function)
    assert (flow.kind, flow.degree) == ("reduced", 1), flow


@pytest.mark.parametrize("function", COMPARED)
def test_comparisons(function: Any) -> None:
    flow = flow_of(function)
    assert flow.kind == "compared", flow
    assert flow.origin is not None


RAGGED = tf.RaggedTensorSpec([None, None], tf.float32)
SPARSE = tf.SparseTensorSpec([None, FEATURES], tf.float32)

dense = tf.sparse.to_dense


@pytest.mark.parametrize(
    ("function", "spec", "kind"),
    [
        (tf.reduce_mean, RAGGED, "nonlinear"),
        (lambda x: tf.reduce_mean(x.values), RAGGED, "nonlinear"),
        (lambda x: tf.reduce_sum(x.values), RAGGED, "reduced"),
        (lambda x: noisy_sum(x.values), RAGGED, "reduced"),
        (lambda x: tf.reduce_mean(x.values), SPARSE, "nonlinear"),
        (tf.sparse.reduce_sum, SPARSE, "reduced"),
        (lambda x: tf.sparse.reduce_sum(x, axis=0), SPARSE, "reduced"),
        (lambda x: tf.reduce_mean(tf.sparse.reduce_sum(x, axis=1)), SPARSE, "reduced"),
        (tf.sparse.reduce_max, SPARSE, "compared"),
        (lambda x: tf.reduce_mean(dense(tf.sparse.add(x, x))), SPARSE, "reduced"),
        (lambda x: tf.reduce_mean(tf.sparse.add(x, dense(x))), SPARSE, "reduced"),
        (lambda x: tf.reduce_mean(dense(tf.sparse.concat(1, [x, x]))), SPARSE, "reduced"),
        (lambda x: tf.reduce_mean(dense(tf.sparse.concat(-2, [x, x]))), SPARSE, "nonlinear"),
        (lambda x: tf.reduce_mean(dense(x * dense(x))), SPARSE, "reduced"),
        (lambda x: tf.reduce_mean((x * dense(x)).values), SPARSE, "nonlinear"),
        (lambda x: tf.reduce_mean(dense(x * dense(x)[::-1])), SPARSE, "compared"),
        (lambda x: dense(x * tf.reduce_sum(dense(x), axis=0)), SPARSE, "nonlinear"),
        (lambda x: tf.sparse.sparse_dense_matmul(x, dense(x), adjoint_a=True), SPARSE, "unknown"),
        (lambda x: tf.sparse.sparse_dense_matmul(x, dense(x), adjoint_b=True), SPARSE, "unknown"),
    ],
)
def test_values_of_which_examples_have_different_numbers(
    function: Any, spec: Any, kind: str
) -> None:
    assert flow_of(function, spec=spec).kind == kind


def longest(x: Any) -> Any:
    return tf.shape(x.to_tensor())[1]


def over(values: Any, number: Any) -> Any:
    return values / tf.cast(number, tf.float32)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: over(tf.reduce_sum(x.to_tensor(), axis=1), longest(x)),
        lambda x: over(tf.reduce_sum(x.to_tensor(), axis=1), tf.maximum(longest(x), 1)),
        lambda x: over(x.to_tensor(), tf.unstack(tf.shape(x.to_tensor()))[1]),
        lambda x: tf.reduce_sum(x.to_tensor()) * tf.math.rsqrt(tf.cast(longest(x), tf.float32)),
        lambda x: over(x.to_tensor(), tf.reduce_sum(tf.ones_like(x.to_tensor()), axis=1)[:, None]),
        lambda x: x.to_tensor() * over(tf.cast(tf.range(longest(x)), tf.float32), longest(x)),
        lambda x: tf.reduce_mean(x.to_tensor(), axis=1),
    ],
)
def test_numbers_that_depend_on_the_longest_row_of_a_batch(function: Any) -> None:
    flow = flow_of(function, spec=RAGGED)
    assert (flow.kind, flow.origin.type) == ("compared", "RaggedTensorToTensor")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.to_tensor() * tf.sequence_mask(x.row_lengths(), longest(x), tf.float32),
        lambda x: x.to_tensor() * tf.cast(tf.range(longest(x)), tf.float32),
        lambda x: tf.reshape(x.to_tensor(), [-1, longest(x), 1]),
        lambda x: over(x.to_tensor(shape=[None, 7]), tf.shape(x.to_tensor(shape=[None, 7]))[1]),
        lambda x: over(tf.reduce_sum(x.to_tensor(), axis=1), x.row_lengths()),
    ],
)
def test_positions_and_shapes_of_padded_rows(function: Any) -> None:
    flow = flow_of(function, spec=RAGGED)
    assert (flow.kind, flow.axes) == ("rows", ((0, "examples"),))


def sampled(loss: Any) -> Callable[[Any], Any]:
    """A loss with given negatives."""

    def function(x: Any) -> Any:
        given = (tf.constant([1, 2], tf.int64), tf.ones_like(x[:, :1]), tf.ones([2]))
        labels = tf.cast(x[:, :1], tf.int64)
        return loss(tf.transpose(KERNEL), tf.ones([3]), labels, x, 2, 3, sampled_values=given)

    return function


@pytest.mark.parametrize(
    "function",
    [
        lambda x: tf.sparse.sparse_dense_matmul(tf.sparse.from_dense(x), KERNEL),
        lambda x: tf.sparse.to_dense(tf.sparse.from_dense(x)),
        lambda x: tf.sparse.reduce_sum(tf.sparse.from_dense(x), axis=1),
        sampled(tf.nn.sampled_softmax_loss),
        sampled(tf.nn.nce_loss),
    ],
)
def test_rows_of_examples(function: Any) -> None:
    flow = flow_of(function)
    assert (flow.kind, flow.axes) == ("rows", ((0, "examples"),))


@pytest.mark.parametrize("function", NONLINEAR)
def test_functions_of_reductions(function: Any) -> None:
    flow = flow_of(function)
    assert flow.kind == "nonlinear", flow
    assert flow.origin is not None


@pytest.mark.parametrize(
    "function",
    [
        lambda x: tf.random.normal([4, FEATURES]),
        lambda x: WEIGHTS + 0.1 * keras.random.normal((FEATURES,)),
        lambda x: ops.zeros((4,)) + 4.0,
        lambda x: inner(WEIGHTS),
    ],
)
def test_values_that_do_not_derive_from_the_batch(function: Any) -> None:
    assert flow_of(function).kind == "fixed"


def test_recurrent_layer_keeps_examples_apart() -> None:
    flow = flow_of(lambda x: CELL(x), 6, FEATURES)
    assert (flow.kind, flow.axes) == ("rows", ((0, "examples"),)), flow


def test_convolution_keeps_examples_apart() -> None:
    def images(x: Any) -> Any:
        x = tf.nn.conv2d(x, IMAGE_KERNEL, 1, "SAME")
        return ops.mean(ops.max_pool(x, 2), axis=(1, 2))

    flow = flow_of(images, 8, 8, 1)
    assert (flow.kind, flow.axes) == ("rows", ((0, "examples"),)), flow


def test_attention_keeps_examples_apart() -> None:
    attention = keras.layers.MultiHeadAttention(2, 3)
    flow = flow_of(lambda x: ops.mean(attention(x, x)), 6, FEATURES)
    assert (flow.kind, flow.degree) == ("reduced", 0), flow


def kind_of(increment: Callable[[Any], Any]) -> str:
    """`increment_kind` of a value that a step adds to a variable."""
    found = []

    @tf.function(autograph=False)
    def step(x: Any) -> Any:
        ten = tf.constant(10)
        weight = ReplicaWeight(ten, ten, uneven=False, size_known=True, in_loss=True)
        weight.begins(x)
        found.append(increment_kind(increment(x), weight))
        return x

    step.get_concrete_function(tf.TensorSpec([None, FEATURES]))
    return found[0]


@pytest.mark.parametrize(
    ("increment", "expected"),
    [
        (lambda x: ops.sum(x, axis=0), "sum"),
        (number_of, "sum"),
        (lambda x: ops.cast(tf.size(x), "float32"), "sum"),
        (lambda x: tf.transpose(x) @ x, "sum"),
        (lambda x: ops.mean(x, axis=0), "once"),
        (lambda x: ops.sum(ones(x) * WEIGHTS, axis=0), "sum"),
        (lambda x: ops.mean(ops.relu(ones(x) @ KERNEL), axis=0), "once"),
        (lambda x: ops.sqrt(number_of(x)), "unknown"),
        (lambda x: number_of(x) + 3.0, "unknown"),
        (lambda x: WEIGHTS * 0 + number_of(x), "sum"),
        (lambda x: tf.constant(1.0), "once"),
        (lambda x: 2 * WEIGHTS, "once"),
        (lambda x: ops.sqrt(ops.mean(x)), "unknown"),
        (lambda x: 1.0, "unknown"),
        (lambda x: tf.random.normal([4]), "once"),
        (lambda x: ops.sum(tf.random.normal([4])), "once"),
    ],
)
def test_kind_of_an_increment(increment: Any, expected: str) -> None:
    assert kind_of(increment) == expected


def test_flow_of_an_eager_tensor_is_unknown() -> None:
    assert Dataflow(()).of(tf.reduce_sum(tf.ones([4]))) == Flow("unknown")


def of_unknown_rank(x: Any) -> Any:
    return tf.numpy_function(lambda x: x, [x], tf.float32)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: tf.unstack(x, num=2, axis=1)[0],
        lambda x: tf.split(x, 2, axis=1)[0],
        lambda x: tf.expand_dims(x, 1),
        lambda x: tf.stack([x, x], axis=1),
        lambda x: tf.concat([x, x], axis=1),
        lambda x: tf.reshape(x, [-1]),
        lambda x: tf.linalg.diag(x),
        lambda x: x[0],
        lambda x: tf.gather(x, [0], axis=1),
        lambda x: tf.matmul(x, x, transpose_b=True),
        lambda x: tf.einsum("ij,kj->ik", x, x),
        lambda x: tf.cumsum(x, axis=1),
        lambda x: tf.tile(x, tf.shape(x)),
        lambda x: tf.broadcast_to(x, tf.shape(x)),
    ],
)
def test_values_of_unknown_rank(function: Any) -> None:
    """Their flow is unknown, unless they do not depend on the batch."""
    assert flow_of(lambda x: function(of_unknown_rank(x))).kind == "unknown"
    assert flow_of(lambda x: function(of_unknown_rank(KERNEL + 0.0))).kind == "fixed"
