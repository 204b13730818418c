"""Models of KerasRS with tables on parameter servers, trained on ratings of films.

ps_recommenders.py [--export=DIR]

With one worker each is trained beside the same model that Keras trains in this process. With DIR
the retrieval is exported: to DIR/sharded, with a copy of the films that it chooses from, and to
DIR/whole, where it reads the table of films.
"""

import argparse
from pathlib import Path
from typing import Any

import keras
import keras_rs
import numpy as np
import tensorflow as tf

import tfmw
from tests.helpers.ratings import GENRES, ratings
from tests.programs import _of_keras, _result
from tfmw.tables.table import is_table, tables_among

parser = argparse.ArgumentParser()
parser.add_argument("--export")
options = parser.parse_args()

USERS, MOVIES, WIDTH = 30_000, 4_000, 16  # tables of 1.9 MB and 0.3 MB
BATCH, STEPS, EPOCHS, BEST = 128, 20, 3, 10


def dcn(optimizer: Any) -> keras.Model:
    """Predicts a rating from user, film and its genres, by a deep and cross network."""
    keras.utils.set_random_seed(1)
    inputs = {
        "user_id": keras.Input((), dtype="int64", name="user_id"),
        "movie_id": keras.Input((), dtype="int64", name="movie_id"),
        "genres": keras.Input((GENRES,), name="genres"),
    }
    features = [
        keras.layers.Embedding(USERS, WIDTH, name="users")(inputs["user_id"]),
        keras.layers.Embedding(MOVIES, WIDTH, name="movies")(inputs["movie_id"]),
        keras.layers.Dense(8)(inputs["genres"]),
    ]
    begin = keras.layers.Concatenate()(features)
    crossed = keras_rs.layers.FeatureCross(projection_dim=8)(begin)
    crossed = keras_rs.layers.FeatureCross()(begin, crossed)
    deep = keras.layers.Dense(16, activation="relu")(crossed)
    model = keras.Model(inputs, _rating(deep))
    model.compile(optimizer, "mse", metrics=[keras.metrics.RootMeanSquaredError(name="rmse")])
    return model


def dlrm(optimizer: Any) -> keras.Model:
    """Predicts a rating by products of rows, from KerasRS's own embeddings."""
    keras.utils.set_random_seed(2)
    inputs = {
        "user_id": keras.Input((), BATCH, dtype="int64", name="user_id"),
        "movie_id": keras.Input((), BATCH, dtype="int64", name="movie_id"),
        "genres": keras.Input((GENRES,), BATCH, name="genres"),
    }
    features = {
        name: keras_rs.layers.FeatureConfig(
            name,
            keras_rs.layers.TableConfig(f"table_of_{name}", size, WIDTH),
            input_shape=(BATCH,),
            output_shape=(BATCH, WIDTH),
        )
        for name, size in (("user_id", USERS), ("movie_id", MOVIES))
    }
    ids = {name: inputs[name] for name in features}
    rows = keras_rs.layers.DistributedEmbedding(features)(ids)
    of_genres = keras.layers.Dense(WIDTH)(inputs["genres"])
    products = keras_rs.layers.DotInteraction()([rows["user_id"], rows["movie_id"], of_genres])
    model = keras.Model(inputs, _rating(products))
    model.compile(optimizer, "mse")
    return model


def _rating(x: Any) -> Any:
    return keras.layers.Dense(1, bias_initializer=keras.initializers.Constant(3.5))(x)


class Retrieval(keras.Model):
    """Learns which films users rate: the product of their rows is large."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.movies = (
            keras.layers.Embedding(size, WIDTH, keras.initializers.RandomNormal(stddev=0.2))
            for size in (USERS, MOVIES)
        )
        self.of_others = keras_rs.layers.RemoveAccidentalHits()

    def build(self, shape: Any) -> None:
        self.users.build(shape)
        self.movies.build(shape)
        self.built = True

    def call(self, inputs: dict[str, Any]) -> Any:
        return self.users(inputs["user_id"])

    def compute_loss(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True
    ) -> Any:
        """A user's own film among those of the batch."""
        del y, sample_weight, training
        ops = keras.ops
        scores = ops.matmul(y_pred, ops.transpose(self.movies(x["movie_id"])))
        labels = ops.eye(ops.shape(scores)[0])
        scores = self.of_others(scores, labels, x["movie_id"])
        return ops.mean(keras.losses.categorical_crossentropy(labels, scores, from_logits=True))


def retrieval(optimizer: Any) -> keras.Model:
    """The model above, built and compiled."""
    keras.utils.set_random_seed(3)
    model = Retrieval()
    model.build(None)
    model.compile(optimizer)
    return model


def dataset(data: dict[str, np.ndarray]) -> tf.data.Dataset:
    features = {name: value for name, value in data.items() if name != "rating"}
    both = tf.data.Dataset.from_tensor_slices((features, data["rating"]))
    return both.batch(BATCH, drop_remainder=True)


def off_by(ours: Any, others: Any) -> float:
    """The largest difference between variables; of tables all rows are looked up."""
    largest = 0.0
    for v, w in zip(ours, others, strict=True):
        own = tf.gather(v, np.arange(v.shape[0])).numpy() if is_table(v) else v.numpy()
        largest = max(largest, float(np.abs(own - w.numpy()).max()))
    return largest


def refusal(call: Any) -> str | None:
    """The message of the tfmw.TfmwError that a call raises."""
    try:
        call()
    except tfmw.TfmwError as e:
        return str(e)
    return None


of = keras.optimizers
# Keras's momentum moves rows that a batch does not have: there, each batch is the first.
CASES: dict[str, tuple[Any, Any, int]] = {
    "dcn, SGD": (dcn, lambda: of.SGD(0.02), STEPS),
    "dcn, Adagrad": (dcn, lambda: of.Adagrad(0.05), STEPS),
    "dcn, Adam": (dcn, lambda: of.Adam(0.01), 1),
    "dlrm, Adagrad": (dlrm, lambda: of.Adagrad(0.2), STEPS),
    "retrieval, Adam": (retrieval, lambda: of.Adam(0.01), 1),
    "retrieval, Adagrad": (retrieval, lambda: of.Adagrad(0.4, 1e-4), STEPS),
}
# Grappler's rewrites of a graph depend on what is around an op, and round otherwise.
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
cluster = tfmw.init()
alone = cluster.num_workers == 1
ordinary = {name: make(optimizer()) for name, (make, optimizer, _) in CASES.items() if alone}
strategy = tfmw.strategies.parameter_server(min_shard_bytes=1 << 16, max_whole_bytes=1 << 20)
models: dict[str, Any] = {}
found: dict[str, Any] = {}
for name, (make, optimizer, batches) in CASES.items():
    if not alone and name not in ("dcn, Adagrad", "retrieval, Adagrad"):
        continue
    model = models[name] = make(optimizer())
    data = ratings(STEPS, BATCH, USERS, MOVIES, seed=1, once=alone)
    train = dataset(data).take(batches).repeat()
    fit: dict[str, Any] = {"epochs": EPOCHS, "steps_per_epoch": STEPS, "verbose": 0}
    history = tfmw.fit(model, train, strategy=strategy, **fit)
    test = dataset(ratings(4, BATCH, USERS, MOVIES, seed=2))
    found[name] = {
        "loss": history.history["loss"],
        "iterations": int(model.optimizer.iterations.numpy()),
        "tables": [v.path for v in tables_among(model.weights)],
        "slots": len(tables_among(model.optimizer.variables)),
        "evaluated": tfmw.evaluate(model, test, verbose=0),
    }
    if alone:
        keras_s = ordinary[name]
        _of_keras.fit(keras_s, train, **fit)
        found[name] |= {
            "off_by": off_by(model.weights, keras_s.weights),
            "slots_off_by": off_by(model.optimizer.variables, keras_s.optimizer.variables),
            "evaluated_by_keras": _of_keras.evaluate(keras_s, test, verbose=0),
            "predicted_off_by": float(
                np.abs(
                    tfmw.predict(model, test, verbose=0)
                    - _of_keras.predict(keras_s, test, verbose=0)
                ).max()
            ),
        }


def recommender(users: Any, candidates: Any, ids: Any = None) -> keras.Model:
    """Users' ids to the scores and ids of their best films."""
    best = keras_rs.layers.BruteForceRetrieval(k=BEST)
    if isinstance(candidates, keras.Variable):
        best.candidate_embeddings = candidates
        best.built = True
    else:
        best.update_candidates(candidates, ids)
    inputs = keras.Input((), dtype="int64")
    scores, movies = best(users(inputs))
    return keras.Model(inputs, {"scores": scores, "movies": movies})


trained = models["retrieval, Adagrad"]
some = np.arange(64)
scores = trained.users(some).numpy() @ trained.movies(np.arange(MOVIES)).numpy().T
best = -np.sort(-scores, axis=1)[:, :BEST]


def retrieved(model: keras.Model) -> dict[str, Any]:
    """The films that a model finds, and by how much they are not the best."""
    outputs = tfmw.predict(model, some, verbose=0)
    by_score = np.abs(outputs["scores"] - best).max()
    by_film = np.abs(np.take_along_axis(scores, outputs["movies"], axis=1) - best).max()
    return {"films": outputs["movies"].tolist(), "off_by": float(max(by_score, by_film))}


of_table = recommender(trained.users, trained.movies.embeddings)
of_copy = recommender(trained.users, trained.movies(np.arange(MOVIES)), np.arange(MOVIES))
found["retrieved"] = {
    "best_scores": best.tolist(),
    "of_table": retrieved(of_table),
    "of_copy": retrieved(of_copy),
    "refused": refusal(lambda: recommender(trained.movies, trained.users.embeddings)),
}
if options.export:
    tfmw.export(of_copy, f"{options.export}/sharded", tables="sharded")
    tfmw.export(of_table, f"{options.export}/whole")
    found["retrieved"]["export_refused"] = refusal(
        lambda: tfmw.export(of_table, f"{options.export}/refused", tables="sharded")
    )
    found["exported"] = sorted(path.name for path in Path(options.export).iterdir())
_result.write(found)
