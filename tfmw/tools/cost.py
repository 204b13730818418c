"""The parts of a step's time, as `tfmw bench` prints them. Standard library only."""

from __future__ import annotations

import dataclasses
from typing import Self

ROUND_S = 140e-9
"""Seconds that a round computes for each weight: difference, 8 bits and back, outer step.

Measured by `python -m bench.slow_network`, on two workers of two cores.
"""

EVERY = 100  # steps between two rounds, of a prediction
PAYS = 0.67  # of a step's time, from which on rounds are proposed

PARTS = ("compute", "update", "overhead", "communication", "input")


@dataclasses.dataclass(frozen=True)
class Cost:
    """The parts of one step's time, in seconds, on `workers` workers.

    Attributes:
        workers: number of workers that it was measured on.
        compute: forward and backward pass, and an update of the weights that is not sharded.
        communication: all-reduce of the gradients that a step waits for.
        input: waiting for the next batch.
        overhead: what the same step takes longer on several workers, though nothing is reduced.
        update: this worker's part of an update that the workers shard.
    """

    workers: int
    compute: float
    communication: float
    input: float
    overhead: float = 0.0
    update: float = 0.0

    @property
    def step(self) -> float:
        """Seconds of one step."""
        return self.compute + self.update + self.overhead + self.communication + self.input

    @property
    def network(self) -> float:
        """Seconds that gradients travel in a step, as far as known."""
        return self.communication

    def with_rounds(self, every: int, parameters: int) -> Self:
        """The same with `sync_every=every` and `sync_compression="int8"`.

        A round sends a quarter of the bytes of a step; each worker makes whole updates.
        """
        rounds = (self.network / 4 + ROUND_S * parameters) / every
        compute = self.compute + self.workers * self.update
        return dataclasses.replace(self, compute=compute, update=0.0, communication=rounds)

    @property
    def bound_by(self) -> str:
        """The largest part of a step."""
        parts = {n: getattr(self, n) for n in PARTS}
        return max(parts, key=parts.__getitem__)


ADVICE = {
    "compute": "more workers share the work; compile(jit_compile=True), "
    "precision='mixed_bfloat16' where the processor has it, or GPUs, make it less.",
    "update": "more workers share it, each with a smaller part.",
    "overhead": "larger batches per worker, or steps_per_execution, make it less of a step.",
    "communication": "larger batches per worker need fewer reductions per example; "
    "gradient_compression='bf16' halves the bytes that are sent; more workers make it no better.",
    "input": "end the dataset in .batch(...).prefetch(tf.data.AUTOTUNE), map with "
    "num_parallel_calls=tf.data.AUTOTUNE, cache decoded examples; or pass a callable to fit, so "
    "that each worker reads its own files.",
}


def report(cost: Cost, global_batch: int | None, parameters: int, update: str = "") -> str:
    """Lines to print: parts of a step, what bounds it, and what to change.

    Args:
        update: how the weights are updated.
    """
    about = f"{cost.workers} worker(s), {parameters:,} parameters"
    if global_batch:
        about += f", global batch {global_batch}: {global_batch / cost.step:,.0f} examples/s"
    lines = [about, f"{'part of a step':<16} {'ms':>9} {'share':>6}"]
    for name in (*PARTS, "step"):
        seconds = getattr(cost, name)
        if name != "update" or seconds:
            lines.append(f"{name:<16} {1000 * seconds:>9.2f} {seconds / cost.step:>6.0%}")
    if update:
        lines.append(f"the weights are updated {update}")
    lines.append(f"bound by {cost.bound_by}: {ADVICE[cost.bound_by]}")
    rounds = cost.with_rounds(EVERY, parameters)
    if cost.workers > 1 and rounds.step < PAYS * cost.step:
        lines.append(
            f"with sync_every={EVERY}, sync_compression='int8' about {1000 * rounds.step:.2f} ms; "
            "it is experimental, and results differ from one process's"
        )
    return "\n".join(lines)
