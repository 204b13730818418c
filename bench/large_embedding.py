"""Trains an embedding that is too large to be copied: who holds how much, and how much moves.

    python bench/large_embedding.py [--gigabytes 2] [--optimizer adagrad]

Two workers train a table that is divided over two parameter servers, with a backup after each
epoch, then the model is evaluated. Printed: the peak memory of every process, beside what it had
before there was a model, and what went over the network in one step. A server holds its half of
the table and of the optimizer's slots; a worker and the coordinator hold the rows of a batch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WIDTH, BATCH, STEPS, LABELS = 64, 512, 200, 64
MB = 1 << 20


def main() -> None:
    """Starts the cluster, whose chief prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of the table")
    parser.add_argument("--optimizer", default="adagrad", choices=("sgd", "adagrad", "adam"))
    parser.add_argument("--json", help="a file for the figures, instead of a table")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        report(train(int(options.gigabytes * 1024 * MB), options.optimizer), options.json)
        return
    # Each task has memory of its own: what copies of one process share would count for each.
    cluster = [sys.executable, "-m", "tfmw", "run", "--standby=off", "--workers", "2", "--ps", "2"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run([*cluster, __file__, *sys.argv[1:], "--train"], env=environ)
    sys.exit(done.returncode)


def train(table_bytes: int, optimizer: str) -> dict[str, Any]:
    """Trains on the cluster of `tfmw run`; returns the figures.

    The label of an id is a hash of it, so nothing but the id's own row can tell it: the loss falls
    as rows are visited again.
    """
    import tfmw

    tfmw.init()  # workers and servers end here
    import keras
    import tensorflow as tf

    before = memory("VmRSS")
    rows = table_bytes // (4 * WIDTH)
    strategy = tfmw.strategies.parameter_server(
        min_shard_bytes=table_bytes // 2, max_whole_bytes=table_bytes // 2
    )
    model = keras.Sequential(
        [
            keras.Input((), dtype="int64"),
            keras.layers.Embedding(rows, WIDTH, keras.initializers.RandomUniform(seed=1)),
            keras.layers.Dense(LABELS),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        {"sgd": "sgd", "adagrad": keras.optimizers.Adagrad(0.5), "adam": "adam"}[optimizer], loss
    )

    def read(context: tf.distribute.InputContext) -> tf.data.Dataset:
        # Ids from all over the table, a few thousand of them, so that each comes often.
        some = tf.range(0, rows, max(1, rows // 4096), tf.int64)
        ids = tf.data.Dataset.from_tensor_slices(some).repeat()
        ids = ids.shuffle(4096, seed=context.input_pipeline_id + 1)
        return ids.batch(BATCH).map(lambda i: (i, i // max(1, rows // 4096) * 40503 % LABELS))

    class Watch(keras.callbacks.Callback):
        """Reads what the network moved during the steps of an epoch, the last in the end."""

        moved = 0

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.begun = moved_bytes()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch + 1 == STEPS:
                self.moved = moved_bytes() - self.begun

    watch = Watch()
    with tempfile.TemporaryDirectory() as backups:
        history = tfmw.fit(
            model,
            read,
            epochs=3,
            steps_per_epoch=STEPS,
            verbose=0,
            strategy=strategy,
            callbacks=[watch],
            backup_dir=backups,
        )
    evaluated = tfmw.evaluate(model, read, steps=20, verbose=0)
    return {
        "table": rows * WIDTH * 4,
        "before": before,
        "peak": memory("VmHWM"),
        "moved per step": watch.moved / STEPS,
        "rows per step": BATCH * WIDTH * 4,
        "loss": [*history.history["loss"], evaluated],
    }


def memory(field: str) -> dict[str, int]:
    """Bytes by task, of all tasks that the launcher of this one has.

    Args:
        field: of /proc/PID/status: VmRSS, what it has now; VmHWM, the most that it ever had.
    """
    launcher = os.getppid()
    found = {}
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        folder = Path("/proc", child)
        environ = dict(
            e.split("=", 1) for e in (folder / "environ").read_text().split("\0") if "=" in e
        )
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        if "TFMW_TASK" in environ:  # others are the launcher's helpers
            found[environ["TFMW_TASK"]] = int(status[field].split()[0]) * 1024
    return dict(sorted(found.items()))


def moved_bytes() -> int:
    """Bytes that came over the loopback interface; the tasks' own, where they have one."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (fields,) = (line.split(":")[1].split() for line in lines if line.strip().startswith("lo:"))
    return int(fields[0])


def report(found: dict[str, Any], file: str | None) -> None:
    """Prints the figures, or writes them to a file."""
    if file:
        Path(file).write_text(json.dumps(found))
        return
    print(f"{'MB':12}{'at first':>10}{'peak':>8}{'more, of the table':>20}")
    print(f"{'the table':12}{'':>10}{found['table'] / MB:8.0f}{'100 %':>20}")
    for task, peak in found["peak"].items():
        before = found["before"][task]
        gained = f"{100 * (peak - before) / found['table']:.0f} %"
        print(f"{task:12}{before / MB:10.0f}{peak / MB:8.0f}{gained:>20}")
    moved, rows = found["moved per step"], found["rows per step"]
    print(f"moved in a step: {moved / 1024:.0f} kB, with {rows / 1024:.0f} kB of rows looked up")
    print("loss:", " ".join(f"{loss:.3f}" for loss in found["loss"]))


if __name__ == "__main__":
    main()
