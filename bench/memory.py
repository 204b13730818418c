"""Peak memory of a worker in multiples of its weights, by Keras's fit, tfmw and PyTorch DDP.

    python -m bench.memory [--mb 210] [--only tfmw ddp]

A figure is the peak resident memory of the worker with the most, less that after the imports. It is
divided by the bytes of the weights (an MLP, Adam, small batches). Needs the extra `bench`
(PyTorch).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.figures import Figure, markdown
from bench.steps import start

LAYERS, INPUTS, CLASSES, BATCH, STEPS = 3, 64, 10, 8, 6
MB, WORKERS = 210.0, (2, 4)  # MB of weights; number of processes
# (workers, with backups) -> the multiple that is the goal of tfmw.
GOALS = {(2, False): 5.0, (4, False): 4.3, (2, True): 6.0}


def _width(mb: float) -> int:
    """Width of the square layers, all but the first, that have so many MB of float32 weights."""
    return int((mb * 1e6 / 4 / (LAYERS - 1)) ** 0.5)


def _peak() -> int:
    """Peak resident memory of this process, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _keras_parts(width: int) -> tuple[Any, Any]:
    """(model, dataset)."""
    import keras
    import numpy as np
    import tensorflow as tf

    layers = [keras.layers.Dense(width, activation="relu") for _ in range(LAYERS)]
    model = keras.Sequential([keras.Input((INPUTS,)), *layers, keras.layers.Dense(CLASSES)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-4), loss)
    random = np.random.default_rng(0)
    numbers = random.random((64, INPUTS), np.float32), random.integers(0, CLASSES, 64)
    return model, tf.data.Dataset.from_tensor_slices(numbers).repeat().batch(BATCH)


def _bytes_of(model: Any) -> int:
    return sum(4 * int(w.value.shape.num_elements()) for w in model.weights)


def stock_fit(width: int, backups: str) -> tuple[int, int]:
    """(peak above the imports, bytes of weights) of Keras's own fit."""
    import keras

    model, data = _keras_parts(8)
    model.fit(data, steps_per_epoch=1, verbose=0)  # includes the memory of late imports
    before = _peak()
    model, data = _keras_parts(width)
    saves = [keras.callbacks.BackupAndRestore(backups, save_freq=STEPS // 2)] if backups else []
    model.fit(data, epochs=2, steps_per_epoch=STEPS, verbose=0, callbacks=saves)
    return _peak() - before, _bytes_of(model)


def tfmw(width: int, backups: str, **options: Any) -> tuple[int, int]:
    """(peak above the imports, bytes of weights) of tfmw.fit."""
    import tfmw

    tfmw.init()
    model, data = _keras_parts(8)
    tfmw.fit(model, data, steps_per_epoch=1, verbose=0)
    before = _peak()
    model, data = _keras_parts(width)
    if backups:
        options |= {"backup_dir": backups, "backup_every": STEPS // 2}
    tfmw.fit(model, data, epochs=2, steps_per_epoch=STEPS, verbose=0, **options)
    return _peak() - before, _bytes_of(model)


def tfmw_unshared(width: int, backups: str) -> tuple[int, int]:
    """(peak above the imports, bytes of weights) of tfmw.fit without a sharded update."""
    return tfmw(width, backups, shard_optimizer=False)


def ddp(width: int, backups: str) -> tuple[int, int]:
    """(peak above the imports, bytes of weights) of PyTorch's DistributedDataParallel with gloo."""
    import torch
    from torch import distributed, nn
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    before = _peak()
    sizes = [INPUTS, *[width] * LAYERS]
    layers: list[Any] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(width, CLASSES)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    x, y = torch.rand(BATCH, INPUTS), torch.randint(0, CLASSES, (BATCH,))
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if backups and step % (STEPS // 2) == 0 and distributed.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, os.path.join(backups, "state"))
    peak = _peak() - before
    distributed.destroy_process_group()
    return peak, sum(4 * p.numel() for p in model.parameters())


CONTENDERS: dict[str, tuple[str, Callable[[int, str], tuple[int, int]]]] = {
    "stock_fit": ("Keras's `fit`", stock_fit),
    "ddp": ("PyTorch DDP, gloo", ddp),
    "tfmw": ("tfmw, sharded update", tfmw),
    "tfmw_unshared": ("tfmw, `shard_optimizer=False`", tfmw_unshared),
}
"""Contender -> its name on the page, and what it runs."""

Multiples = dict[tuple[str, int, bool], float]
"""(contender, workers, with backups) -> peak memory in multiples of the weights."""


def _measured(name: str, workers: int, mb: float, with_backups: bool) -> float:
    """Peak memory in multiples of the weights, of the worker with the most."""
    with tempfile.TemporaryDirectory() as folder:
        results, backups = Path(folder, "results"), Path(folder, "backups")
        results.mkdir()
        backups.mkdir()
        command = ["bench.memory", "--worker", name, str(_width(mb)), str(results)]
        command += [str(backups)] if with_backups else []
        start(command, workers, through_tfmw=name.startswith("tfmw"))
        found = [json.loads(file.read_text()) for file in results.iterdir()]
    assert len(found) == workers
    return float(max(peak / weights for peak, weights in found))


def _work(name: str, width: str, results: str, backups: str = "") -> None:
    found = CONTENDERS[name][1](int(width), backups)
    Path(results, os.environ.get("RANK", "0")).write_text(json.dumps(found))


def measured(names: Sequence[str] = tuple(CONTENDERS), mb: float = MB) -> Multiples:
    """Measures the peaks; Keras's own fit is one process.

    Args:
        names: names of contenders.
        mb: size of the weights in MB.
    """
    found: Multiples = {}
    for name in names:
        for workers in [1] if name == "stock_fit" else WORKERS:
            for backups in (False, True):
                found[name, workers, backups] = _measured(name, workers, mb, backups)
    return found


def figures(multiples: Multiples) -> list[Figure]:
    """Each multiple, with its goal."""
    rows = []
    for (name, workers, backups), multiple in multiples.items():
        row = f"memory / weights: {name}, {workers} worker{'s' * (workers > 1)}"
        goal = GOALS.get((workers, backups)) if name == "tfmw" else None
        rows.append(Figure(row + ", with backups" * backups, [multiple], goal))
    return rows


def page_table(multiples: Multiples) -> list[list[str]]:
    """The table of Benchmarks."""
    rows = [["", "workers", "no backups", "with backups"]]
    for name, workers in dict.fromkeys(key[:2] for key in multiples):
        cells = [f"{multiples[name, workers, backups]:.1f}" for backups in (False, True)]
        rows.append([CONTENDERS[name][0], str(workers), *cells])
    return rows


def main() -> None:
    """Measures all, prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mb", type=float, default=MB, help="of weights")
    parser.add_argument("--only", nargs="+", default=list(CONTENDERS))
    options = parser.parse_args()
    print(markdown(figures(measured(options.only, options.mb))))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        _work(*sys.argv[2:])
    else:
        main()
