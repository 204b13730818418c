"""Time of a training step: tfmw beside other frameworks and loops, in one run, as ratios.

    python -m bench.steps [--works cnn,mlp] [--contenders tfmw,all_cores] [--rounds 1]

Contenders take turns in each round, so that other load on the machine affects all alike. Each turn
is a fresh set of processes with one core each. A figure is the ratio of the medians of a round's
epochs, without the first two. Needs the extra `bench` (tf_keras, PyTorch). `make bench` measures
all, and writes the tables of the pages.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.figures import Figure, Rows, markdown, span
from bench.works import WORKS
from tfmw.cluster.sockets import reserved_ports

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 400
FAILED: list[str] = []  # turns that failed, in this process

Turn = tuple[str, int, str]  # work, workers, contender
Medians = dict[Turn, list[float]]  # milliseconds of a step, one for each round

# Work -> workers -> contenders, the first one ours.
PLAN: dict[str, dict[int, list[str]]] = {
    "cnn": {
        1: ["tfmw", "stock_fit"],
        2: ["tfmw", "all_cores", "alone", "legacy_fit", "ddp", "hand_loop", "tfmw_xla"],
    },
    "small_cnn": {2: ["tfmw", "all_cores", "alone", "ddp"]},
    "mlp": {
        1: ["tfmw", "stock_fit"],
        2: [
            "tfmw", "all_cores", "alone", "legacy_fit", "hand_loop", "ddp", "tfmw_bf16", "tfmw_xla",
        ],
    },
    "resnet50": {2: ["tfmw", "all_cores", "alone", "legacy_fit", "ddp"]},
    "transformer": {
        1: ["tfmw", "stock_fit"],
        2: ["tfmw", "all_cores", "alone", "legacy_fit", "ddp", "tfmw_xla"],
    },
}  # fmt: skip
# (work, workers, against) -> the ratio to reach.
GOALS = {
    ("cnn", 2, "ddp"): 0.35,
    ("small_cnn", 2, "ddp"): 0.25,
    ("small_cnn", 2, "alone"): 1.1,
    ("mlp", 2, "ddp"): 0.40,
    ("mlp", 2, "legacy_fit"): 0.22,
    ("mlp", 2, "alone"): 1.2,
    ("mlp", 1, "stock_fit"): 0.65,
    ("transformer", 2, "ddp"): 0.75,
    ("resnet50", 2, "ddp"): 0.45,
}
PAGE_ROWS = {
    "tfmw": "",
    "tfmw_bf16": 'gradient_compression="bf16"',
    "tfmw_xla": "jit_compile=True",
}
PAGE_COLUMNS = {
    "all_cores": "Keras 3 `fit`, one process with all cores",
    "legacy_fit": "tf_keras `fit`, 2 workers",
    "ddp": "PyTorch DDP, gloo, 2 workers",
    "hand_loop": "hand-written loop, 2 workers",
    "alone": "one of the workers alone, no exchange",
    "stock_fit": "Keras 3 `fit`, both in one process with one core",
}
README_PEERS = {
    "all_cores": "one plain Keras process with all cores",
    "legacy_fit": "`tf_keras` on two workers",
    "ddp": "PyTorch DDP on two workers",
}
EPOCHS = 5


def run(contender: str, work: str, workers: int) -> list[float]:
    """Seconds of a step, per epoch, of one fresh set of processes."""
    command = ["bench.contenders", contender, work, str(EPOCHS)]
    cores = workers if contender == "all_cores" else 1
    through_tfmw = contender.startswith(("tfmw", "alone"))
    outputs = start(command, workers // cores, through_tfmw, cores)
    line = next(text for text in outputs[0].splitlines() if text.startswith("["))
    return [float(seconds) for seconds in json.loads(line)]


def start(command: list[str], workers: int, through_tfmw: bool, cores: int = 1) -> list[str]:
    """Output of each of a fresh set of processes.

    Args:
        command: a module and its arguments.
        through_tfmw: whether `tfmw run` starts them.
        cores: number of cores, and of threads of an operation, of each.

    Raises:
        RuntimeError: a process failed; the message is the end of its output.
    """
    with reserved_ports(workers + 1) as ports:
        pass  # all different; the processes take them
    addresses = [f"127.0.0.1:{port}" for port in ports[1:]]
    processes, logs = [], []
    for rank in range(workers):
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
        environ = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(workers),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(ports[0]),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "BENCH_CORES": str(cores),
            "TF_NUM_INTRAOP_THREADS": str(cores),
            "OMP_NUM_THREADS": str(cores),
        }
        if workers > 1:
            environ["TF_CONFIG"] = json.dumps(task)
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (read below)
        first = ["-m", "tfmw", "run", "-m"] if through_tfmw else ["-m"]
        processes.append(
            subprocess.Popen(
                [sys.executable, *first, *command],
                env=environ,
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        )
        logs.append(log)
    try:
        statuses = [process.wait(TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    outputs = []
    for log in logs:
        log.seek(0)
        outputs.append(log.read())
        log.close()
    for rank, status in enumerate(statuses):
        if status:
            end = "\n".join(outputs[rank].splitlines()[-15:])
            raise RuntimeError(f"{' '.join(command)}, worker {rank}: status {status}\n{end}")
    return outputs


def measured(turns: Sequence[Turn], rounds: int, ends_at: float) -> Iterator[Medians]:
    """Milliseconds per step so far, after each work of each round.

    Args:
        turns: turns of a round, in order.
        ends_at: monotonic time. Further rounds are begun only if they will end before.
    """
    medians: Medians = {}
    lasted: dict[str, float] = {}
    for number in range(rounds):
        for work in dict.fromkeys(work for work, _, _ in turns):
            began = time.monotonic()
            if number and began + lasted[work] > ends_at:
                continue
            for turn in (turn for turn in turns if turn[0] == work):
                name = f"round {number + 1}: {work}, {turn[1]} worker(s), {turn[2]}"
                try:
                    ms = 1000 * statistics.median(run(turn[2], work, turn[1]))
                except (RuntimeError, subprocess.SubprocessError, StopIteration) as error:
                    print(error, file=sys.stderr, flush=True)
                    FAILED.append(name)
                    ms = float("nan")
                medians.setdefault(turn, []).append(ms)
                print(f"{name}: {ms:.2f} ms", file=sys.stderr, flush=True)
            lasted[work] = time.monotonic() - began
            yield medians


def planned(works: Sequence[str] = tuple(PLAN), only: Sequence[str] = ()) -> list[Turn]:
    """Turns of a round.

    Args:
        only: contenders; empty for all.
    """
    return [
        (work, workers, contender)
        for work in works
        for workers, contenders in PLAN.get(work, {2: ["tfmw"]}).items()
        for contender in contenders
        if not only or contender in only
    ]


def ratios(medians: Medians, ours: Turn, theirs: Turn) -> list[float]:
    """Time of ours divided by that of theirs, for each round that has both."""
    pairs = zip(medians.get(ours, []), medians.get(theirs, []), strict=False)
    return [a / b for a, b in pairs if a == a and b == b]  # a turn that failed is not a number


def page_tables(medians: Medians) -> dict[str, Rows]:
    """Tables of the pages: a step divided by that of others, from the least round to the most."""
    rows = [["work", *PAGE_COLUMNS.values()]]
    for work in PLAN:
        for ours, how in PAGE_ROWS.items():
            cells = []
            for theirs in PAGE_COLUMNS:
                workers = 1 if theirs == "stock_fit" else 2
                found = ratios(medians, (work, workers, ours), (work, workers, theirs))
                cells.append(span(found))
            if any(cells):
                rows.append([f"the same, `{how}`" if how else WORKS[work].about, *cells])
    return {"steps": rows, "speed": sentence(rows[1:])}


def sentence(rows: Sequence[Sequence[str]]) -> str:
    """README's sentence: the range over all rows of the table of steps, for some of its columns."""
    ranges = []
    for place, column in enumerate(PAGE_COLUMNS, start=1):
        found = re.findall(r"[\d.]+", " ".join(row[place] for row in rows))
        if column in README_PEERS and found:
            ranges.append(f"by that of {README_PEERS[column]}: {span([*map(float, found)])}")
    return f"Time of a step of two workers with one core each, divided {'; '.join(ranges)}."


def figures(medians: Medians) -> list[Figure]:
    """Each ratio, with its goal, and `alone / ddp`, the least that `tfmw / ddp` can be."""
    found = []
    for ours in (turn for turn in medians if turn[2].startswith(("tfmw", "alone"))):
        for theirs in (t for t in medians if t[:2] == ours[:2] and not t[2].startswith("tfmw")):
            if ours[2] == "alone" and theirs[2] != "ddp":
                continue
            if values := ratios(medians, ours, theirs):
                workers = f"{ours[1]} worker{'s' * (ours[1] > 1)}"
                row = f"a step of {ours[0]}: {ours[2]} / {theirs[2]}, {workers}"
                goal = GOALS.get(theirs) if ours[2] == "tfmw" else None
                found.append(Figure(row, values, goal))
    return found


def main() -> None:
    """Measures, and prints the milliseconds and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--works", default=",".join(PLAN))
    parser.add_argument("--contenders", default="", help="only these")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    only = [name for name in options.contenders.split(",") if name]
    medians: Medians = {}
    turns = planned(options.works.split(","), only)
    for medians in measured(turns, options.rounds, float("inf")):  # noqa: B007
        pass
    print(markdown(figures(medians)))


if __name__ == "__main__":
    main()
