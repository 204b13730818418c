"""Memory and traffic of a table that is too large to be copied, in each phase of a training.

    python bench/tables.py [--gigabytes 2] [--servers 2] [--optimizer adagrad] [--workers 2]

Workers train a table that is divided over parameter servers, with a backup after each epoch; then
the model is evaluated and exported, whole and sharded, and a fresh process serves the sharded one.
It prints the peak memory of every process in each phase, and its memory before the model was built.
It also prints the bytes sent over the network in a step and in a backup. A server holds its shard
of the table and of the optimizer's slots; a worker and the coordinator hold the rows of a batch.

Backups and exports are in a temporary directory (TMPDIR): five tables and three times the slots.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WIDTH, BATCH, STEPS, LABELS = 64, 512, 200, 64
EPOCHS = 4  # the first two backups have all rows, later ones the changed rows
MB = 1 << 20


def main() -> None:
    """Starts the cluster, whose chief prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of the table")
    parser.add_argument("--optimizer", default="adagrad", choices=("sgd", "adagrad", "adam"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument(
        "--no_exports", action="store_true", help="they take the disk of two tables"
    )
    parser.add_argument("--json", help="a file for the figures, instead of a table")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        print(json.dumps(serve(options.serve)))
        return
    if options.train:
        table_bytes = int(options.gigabytes * 1024 * MB)
        found = train(table_bytes, options.optimizer, options.servers, not options.no_exports)
        report(found, options.json)
        return
    # Each task has memory of its own: memory that copies of one process share would count for each.
    cluster = [sys.executable, "-m", "tfmw", "run", "--standby=off"]
    cluster += [f"--workers={options.workers}", f"--ps={options.servers}"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run([*cluster, __file__, *sys.argv[1:], "--train"], env=environ)
    sys.exit(done.returncode)


class Phases:
    """Figures of each phase: peak memory of all tasks, seconds, bytes sent.

    Attributes:
        found: figures by phase.
    """

    def __init__(self) -> None:
        self.found: dict[str, dict[str, Any]] = {}

    def begin(self) -> None:
        """Begins a phase, and resets the peaks of the earlier ones."""
        for folder in tasks().values():
            (folder / "clear_refs").write_text("5")  # proc(5): resets VmHWM
        self._moved, self._began = moved_bytes(), time.perf_counter()

    def end(self, name: str) -> None:
        """Ends the phase; the last one of each name is kept."""
        self.found[name] = {
            "peak": memory("VmHWM"),
            "moved": moved_bytes() - self._moved,
            "seconds": time.perf_counter() - self._began,
        }


def train(table_bytes: int, optimizer: str, servers: int, exports: bool) -> dict[str, Any]:
    """Trains on the cluster of `tfmw run`; returns the figures.

    The label of an id is a hash of it, so nothing but the id's own row can tell it: the loss falls
    as rows are visited again.
    """
    import tfmw

    tfmw.init()  # workers and servers end here
    import keras
    import tensorflow as tf

    before = memory("VmRSS")
    phases = Phases()
    phases.begin()
    rows = table_bytes // (4 * WIDTH)
    strategy = tfmw.strategies.parameter_server(
        min_shard_bytes=table_bytes // servers, max_whole_bytes=table_bytes // 2
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
    phases.end("build")

    def read(context: tf.distribute.InputContext) -> tf.data.Dataset:
        # Ids from all over the table, a few thousand of them, so that each comes often.
        some = tf.range(0, rows, max(1, rows // 4096), tf.int64)
        ids = tf.data.Dataset.from_tensor_slices(some).repeat()
        ids = ids.shuffle(4096, seed=context.input_pipeline_id + 1)
        return ids.batch(BATCH).map(lambda i: (i, i // max(1, rows // 4096) * 40503 % LABELS))

    class Watch(keras.callbacks.Callback):
        """Measures the steps of each epoch, and the backup between epochs."""

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            done = ["begin of fit", "full backup", "full backup", "backup of changed rows"]
            phases.end(done[epoch])
            phases.begin()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch + 1 == STEPS:
                phases.end("training")
                phases.begin()

    phases.begin()
    with tempfile.TemporaryDirectory() as backups:
        history = tfmw.fit(
            model,
            read,
            epochs=EPOCHS,
            steps_per_epoch=STEPS,
            verbose=0,
            strategy=strategy,
            callbacks=[Watch()],
            backup_dir=backups,
        )
    phases.end("end of fit")
    phases.begin()
    evaluated = tfmw.evaluate(model, read, steps=20, verbose=0)
    phases.end("evaluation")
    served = None
    if exports:
        for kind in ("whole", "sharded"):
            with tempfile.TemporaryDirectory() as folder:
                phases.begin()
                tfmw.export(model, f"{folder}/model", tables=kind)
                phases.end(f"export, {kind}")
                if kind == "sharded":
                    served = fresh_process(f"{folder}/model")
    peak = {
        task: max(phase["peak"][task] for phase in phases.found.values())
        for task in memory("VmHWM")
    }
    return {
        "table": rows * WIDTH * 4,
        "before": before,
        "peak": peak,
        "phases": phases.found,
        "moved per step": phases.found["training"]["moved"] / STEPS,
        "rows per step": BATCH * WIDTH * 4,
        "loss": [*history.history["loss"], evaluated],
        "served": served,
    }


def fresh_process(path: str) -> dict[str, float]:
    """Result of `serve` in a process of its own, without a cluster."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TF")}
    command = [sys.executable, __file__, f"--serve={path}"]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def serve(path: str) -> dict[str, float]:
    """Serves ids from an export with TensorFlow alone, and measures their rate and the memory."""
    import numpy as np
    import tensorflow as tf

    tf.data.Dataset.range(9).batch(9).get_single_element()
    begun = own("VmHWM")
    model = tf.saved_model.load(path)
    described = json.loads(Path(path, "assets", "tables.json").read_text())
    (rows,) = (table["shape"][0] for table in described.values())
    ids = tf.constant(np.random.default_rng(0).integers(0, rows, [9, 4096]))
    model.serve(ids[0])
    start = time.perf_counter()
    for some in ids[1:]:
        model.serve(some)
    return {
        "ids per second": 8 * 4096 / (time.perf_counter() - start),
        "grew": own("VmHWM") - begun,
    }


def tasks() -> dict[str, Path]:
    """Directory in /proc of each task of this task's launcher, by task."""
    launcher = os.getppid()
    found = {}
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        folder = Path("/proc", child)
        environ = dict(
            e.split("=", 1) for e in (folder / "environ").read_text().split("\0") if "=" in e
        )
        if "TFMW_TASK" in environ:  # others are the launcher's helpers
            found[environ["TFMW_TASK"]] = folder
    return dict(sorted(found.items()))


def memory(field: str) -> dict[str, int]:
    """Bytes of memory by task.

    Args:
        field: a field of /proc/PID/status. VmRSS is the current memory, VmHWM the peak since
            `Phases.begin`.
    """
    return {task: _bytes(folder, field) for task, folder in tasks().items()}


def own(field: str) -> int:
    """Bytes of memory of this process; see `memory`."""
    return _bytes(Path("/proc/self"), field)


def _bytes(folder: Path, field: str) -> int:
    lines = (folder / "status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)[field].split()[0]) * 1024


def moved_bytes() -> int:
    """Bytes received over the loopback interface; this task's own interface, if it has one."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (fields,) = (line.split(":")[1].split() for line in lines if line.strip().startswith("lo:"))
    return int(fields[0])


def report(found: dict[str, Any], file: str | None) -> None:
    """Prints the figures, or writes them to a file."""
    if file:
        Path(file).write_text(json.dumps(found))
        return
    before = found["before"]
    print(f"a table of {found['table'] / MB:.0f} MB; memory above that before the model, in MB")
    print(f"{'':24}" + "".join(f"{task:>11}" for task in before) + f"{'moved':>9}{'s':>7}")
    print(f"{'before':24}" + "".join(f"{size / MB:11.0f}" for size in before.values()))
    for name, phase in found["phases"].items():
        gained = "".join(f"{(phase['peak'][t] - before[t]) / MB:11.0f}" for t in before)
        print(f"{name:24}{gained}{phase['moved'] / MB:9.1f}{phase['seconds']:7.1f}")
    moved, rows = found["moved per step"], found["rows per step"]
    print(f"moved in a step: {moved / 1024:.0f} kB, with {rows / 1024:.0f} kB of rows looked up")
    print("loss:", " ".join(f"{loss:.3f}" for loss in found["loss"]))
    if found["served"]:
        rate, grew = found["served"]["ids per second"], found["served"]["grew"]
        print(f"served by a fresh process: {rate:.0f} ids/s, with {grew / MB:.0f} MB")


if __name__ == "__main__":
    main()
