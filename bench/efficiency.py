"""Efficiency by the number of workers, from 1 to 1,024: a chart for docs/explain/benchmarks.md.

    python -m bench.efficiency [--works cnn mlp transformer] [--out docs/images/efficiency.svg]

Two workers of this machine are measured, as `tfmw bench` does, over TCP. bench/forecast.py then
predicts the step of more workers, each on a machine of its own, for four networks: a link of 0.1,
1, 10 and 100 Gbit/s for each worker, if it is slower than the link of the two here. For the two
slowest, it also predicts rounds: every=100 and compression="int8" of `tfmw.LocalSGD`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bench.forecast import MANY, Forecast, measure, payload
from tfmw.cli.bench import EVERY
from tfmw.launcher.run import launch

NETWORKS = {0.1: 200e-6, 1: 100e-6, 10: 30e-6, 100: 10e-6}  # Gbit/s: seconds of one message
ROUNDS_ON = (0.1, 1)  # Gbit/s
STEPS = 6


def cnn() -> Any:
    """Builds the CNN of TensorFlow's multi-worker tutorial."""
    return _made("cnn")


def mlp() -> Any:
    """Builds an MLP of 25M parameters, with Adam."""
    return _made("mlp")


def transformer() -> Any:
    """Builds a transformer of four layers, with Adam."""
    return _made("transformer")


def _made(name: str) -> Any:
    import keras

    from bench.works import batches, keras_network
    from tfmw import strategies

    workers = strategies.current_strategy().num_replicas_in_sync
    return keras_network(name, keras), batches(name, workers).take(STEPS)


def _lines(cost: Forecast) -> list[tuple[str, int, list[float]]]:
    """(label, number of the network, efficiency on each of MANY workers); rounds come last."""
    found = []
    for number, (gbits, latency) in enumerate(NETWORKS.items()):
        there = [cost.on(n, bandwidth=payload(gbits * 1e9), latency=latency) for n in MANY]
        found.append((f"{gbits} Gbit/s", number, [c.efficiency() for c in there]))
        if gbits in ROUNDS_ON:
            weights = cost.gradient_bytes // 4
            rounds = [c.with_rounds(EVERY, weights) if c.workers > 1 else c for c in there]
            label = f"{gbits} Gbit/s, every={EVERY}"
            found.append((label, number, [c.efficiency() for c in rounds]))
    return found


def table(costs: dict[str, Forecast]) -> str:
    """Table in Markdown: a line for each work and network."""
    lines = [f"| work | network | {' | '.join(f'{n:,}' for n in MANY)} |"]
    lines.append("| --- | --- |" + " --- |" * len(MANY))
    for name, cost in costs.items():
        for network, _, found in _lines(cost):
            lines.append(f"| {name} | {network} | {' | '.join(f'{e:.0%}' for e in found)} |")
    return "\n".join(lines)


def draw(costs: dict[str, Forecast], path: Path) -> None:
    """One panel for each work, one line for each network."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot
    from matplotlib.ticker import PercentFormatter

    matplotlib.rcParams["svg.hashsalt"] = "tfmw"
    figure, panels = pyplot.subplots(
        1, len(costs), figsize=(4 * len(costs), 3.4), sharey=True, squeeze=False, layout="tight"
    )
    for (name, cost), panel in zip(costs.items(), panels[0], strict=True):
        for label, number, found in _lines(cost):
            style = "--" if "every=" in label else "-"
            panel.plot(MANY, found, style, color=f"C{number}", marker="o", label=label)
        panel.set_title(name)
        panel.set_xscale("log", base=2)
        panel.set_xticks(MANY, [f"{n:,}" for n in MANY], rotation=45)
        panel.set_xlabel("workers")
        panel.set_ylim(0, 1.05)
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("efficiency")
    panels[0][0].yaxis.set_major_formatter(PercentFormatter(1.0))
    panels[0][-1].legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Measures, prints a table, and draws."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    flags.add_argument("--works", nargs="+", default=["cnn", "mlp", "transformer"])
    flags.add_argument("--out", type=Path, default=Path("docs/images/efficiency.svg"))
    options = flags.parse_args()
    costs = {}
    for work in options.works:
        costs[work] = launch(measure, (f"bench.efficiency:{work}", STEPS), 2)[0]
        print(f"{work}: {costs[work]}", flush=True)
    print(table(costs))
    draw(costs, options.out)


if __name__ == "__main__":
    main()
