"""Time of a training step: tfmw beside other frameworks and loops, in one run, as ratios.

    python -m bench.steps [--works cnn,mlp] [--rounds 3] [--out build/bench]

Contenders take turns in each round, so that other load on the machine affects all alike. Each turn
is a fresh set of processes with one core each. A figure is the median over all epochs of all rounds
but each one's first two. Needs the extra `bench` (tf_keras, PyTorch). `make bench` runs one round
of those with a goal, and measures memory and whole trainings.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.figures import Figure
from bench.works import WORKS
from tfmw.cluster.sockets import reserved_ports

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 400


@dataclasses.dataclass(frozen=True)
class Row:
    """Milliseconds per step of one contender: median, least and most of its epochs.

    Attributes:
        rounds: the median of each round.
    """

    work: str
    workers: int
    contender: str
    ms: float
    least: float
    most: float
    rounds: tuple[float, ...] = ()


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
            "tfmw", "all_cores", "alone", "legacy_fit", "hand_loop", "ddp",
            "tfmw_bf16", "tfmw_fp16", "tfmw_xla", "tfmw_xla_fp16", "ddp_16_bit",
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
ALWAYS = (
    "tfmw",
    "all_cores",
    "alone",
    "tfmw_xla",
)  # beside those of GOALS, where only these are measured
PEERS = {
    "alone": "each worker alone, its part of the batch",
    "stock_fit": "Keras 3 `fit`",
    "all_cores": "Keras 3 `fit`, one process with all cores",
    "legacy_fit": "tf_keras `fit`",
    "hand_loop": "hand-written loop",
    "ddp": "PyTorch DDP, gloo",
    "ddp_16_bit": "PyTorch DDP, gloo, 16-bit hook",
}
PAGE_ROWS = {
    "tfmw": "",
    "tfmw_bf16": 'gradient_compression="bf16"',
    "tfmw_xla": "jit_compile=True",
}
PAGE_COLUMNS = {
    "stock_fit": "Keras 3 `fit`, 1 process",
    "legacy_fit": "tf_keras `fit`, 2 workers",
    "hand_loop": "hand-written loop, 2",
    "ddp": "PyTorch DDP, gloo, 2",
}
EPOCHS = {"cnn": 6, "small_cnn": 6, "mlp": 6, "resnet50": 5, "transformer": 6, "tiny": 6}


def run(contender: str, work: str, workers: int) -> list[float]:
    """Seconds of a step, per epoch, of one fresh set of processes."""
    command = ["bench.contenders", contender, work, str(EPOCHS[work])]
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


def measure(turns: list[tuple[str, int, str]], rounds: int) -> list[Row]:
    """Medians of all rounds.

    Args:
        turns: the (work, workers, contender) of a round, in order.
    """
    seconds: dict[tuple[str, int, str], list[list[float]]] = {}
    for number in range(rounds):
        for work, workers, contender in turns:
            times = run(contender, work, workers)
            seconds.setdefault((work, workers, contender), []).append(times)
            print(
                f"round {number + 1}: {work}, {workers} worker(s), {contender}: "
                f"{1000 * statistics.median(times):.2f} ms",
                file=sys.stderr,
                flush=True,
            )
    rows = []
    for (work, workers, contender), per_round in seconds.items():
        ms = [1000 * each for times in per_round for each in times]
        medians = tuple(1000 * statistics.median(times) for times in per_round)
        middle = statistics.median(ms)
        rows.append(Row(work, workers, contender, middle, min(ms), max(ms), medians))
    return rows


def with_goals() -> list[tuple[str, int, str]]:
    """(work, workers, contender) of each ratio that has a goal, and of each worker alone."""
    found = []
    for work, workers, contender in planned(list(PLAN), []):
        goal = (work, workers, contender) in GOALS
        if goal or (contender in ALWAYS and any(g[:2] == (work, workers) for g in GOALS)):
            found.append((work, workers, contender))
    return found


def planned(works: list[str], only: list[str]) -> list[tuple[str, int, str]]:
    """(work, workers, contender) of the plan.

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


def ratios(rows: list[Row]) -> list[tuple[str, int, str, str, float, float, float]]:
    """(work, workers, ours, against, ms of ours, ms of theirs, ratio), smaller is better."""
    found = []
    for ours in rows:
        if not ours.contender.startswith("tfmw"):
            continue
        for theirs in rows:
            same = (theirs.work, theirs.workers) == (ours.work, ours.workers)
            if same and not theirs.contender.startswith("tfmw"):
                found.append(
                    (
                        ours.work,
                        ours.workers,
                        ours.contender,
                        theirs.contender,
                        ours.ms,
                        theirs.ms,
                        ours.ms / theirs.ms,
                    )
                )
    return found


def page_tables(rows: list[Row]) -> dict[str, list[list[str]]]:
    """Tables of the page: a step divided by that of others, from the least round to the most."""
    by_key = {(row.work, row.workers, row.contender): row.rounds for row in rows}

    def cell(work: str, ours: str, theirs: str, workers: int = 2) -> str:
        pair = [by_key.get((work, workers, contender), ()) for contender in (ours, theirs)]
        found = sorted(f"{a / b:.2f}" for a, b in zip(*pair, strict=False))
        return " to ".join(dict.fromkeys(found[:1] + found[-1:]))

    all_cores = [["work", "two workers / Keras with all cores"]]
    others = [["work", *PAGE_COLUMNS.values()]]
    for work in PLAN:
        all_cores.append([WORKS[work].about, cell(work, "tfmw", "all_cores")])
        for ours, how in PAGE_ROWS.items():
            cells = [cell(work, ours, t, 1 + (t != "stock_fit")) for t in PAGE_COLUMNS]
            if any(cells):
                others.append([f"the same, `{how}`" if how else WORKS[work].about, *cells])
    return {"all_cores": all_cores, "other_ways": others}


def figures(rows: list[Row]) -> list[Figure]:
    """Each ratio, with its goal."""
    return [
        Figure(
            f"a step of {work}: {ours} / {against}, {workers} worker{'s' * (workers > 1)}",
            ratio,
            GOALS.get((work, workers, against)) if ours == "tfmw" else None,
        )
        for work, workers, ours, against, _, _, ratio in ratios(rows)
    ]


def table(rows: list[Row]) -> str:
    """Table in Markdown."""
    lines = [
        "| work | workers | tfmw, ms per step | against | ms per step | ratio | goal |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for work, workers, ours, against, mine, theirs, ratio in ratios(rows):
        goal = GOALS.get((work, workers, against), "") if ours == "tfmw" else ""
        how = ours.removeprefix("tfmw").strip("_").replace("_", " ")
        how = f" ({how})" if how else ""
        lines.append(
            f"| {WORKS[work].about} | {workers} | {mine:.1f}{how} | {PEERS[against]} | "
            f"{theirs:.1f} | {ratio:.2f} | {goal} |"
        )
    return "\n".join(lines)


def plot(rows: list[Row], path: Path) -> None:
    """Draws milliseconds per step as bars, one panel for each work and number of workers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = sorted({(row.work, row.workers) for row in rows})
    figure, panels = pyplot.subplots(
        len(groups), 1, figsize=(8, 0.6 + 0.35 * (len(rows) + 2 * len(groups))), squeeze=False
    )
    for panel, group in zip(panels[:, 0], groups, strict=True):
        mine = [row for row in rows if (row.work, row.workers) == group][::-1]
        colors = ["#d95f02" if row.contender.startswith("tfmw") else "#7f8fa6" for row in mine]
        errors = [[row.ms - row.least for row in mine], [row.most - row.ms for row in mine]]
        names = [PEERS.get(row.contender, row.contender.replace("_", " ")) for row in mine]
        panel.barh(names, [row.ms for row in mine], color=colors, xerr=errors)
        panel.set_title(f"{WORKS[group[0]].about}: {group[1]} worker(s)", fontsize=9, loc="left")
    panels[-1, 0].set_xlabel("ms per step; lines from the least to the most of an epoch")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def keep(rows: list[Row], folder: Path) -> None:
    """Writes the table, its figures and a plot."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "steps.json").write_text(
        json.dumps([dataclasses.asdict(row) for row in rows], indent=1)
    )
    (folder / "steps.md").write_text(table(rows) + "\n")
    plot(rows, folder / "steps.png")


def main() -> None:
    """Measures, prints the table, and keeps it with its figures and a plot."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--works", default="cnn,small_cnn,mlp,transformer,resnet50")
    parser.add_argument("--contenders", default="", help="only these")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench")
    options = parser.parse_args()
    only = [name for name in options.contenders.split(",") if name]
    rows = measure(planned(options.works.split(","), only), options.rounds)
    keep(rows, options.out)
    print(table(rows))
    print(f"kept in {options.out}: steps.md, steps.json, steps.png")


if __name__ == "__main__":
    main()
