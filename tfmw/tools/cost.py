"""A model of the time of a step on N workers, for `tfmw bench`. Standard library only.

    t(N) = compute + update(N) + overhead + input + exposed(N)
    network(N) = 2 (M - 1) / M * bytes / bandwidth  +  sums * 2 (M - 1) * latency
    exposed(N) = max(network(N) - window, tail * network(N))

The second line is a ring all-reduce between M machines (Patarasuk and Yuan, Bandwidth Optimal
All-reduce Algorithms for Clusters of Workstations, 2009): 2 (M - 1) messages of bytes / M each, and
as many again for each pack of gradients (`sums`). With several workers on each machine there is
another one among those, at the speed of memory; with one worker on each, M is N.

Gradients travel while earlier layers are still computed, at most for the `window` that this takes;
the last ones cannot, and that part of network(N), `tail`, is as measured. An update that workers
share takes an N-th of its time. `overhead` is what a step costs beside other workers, before
anything is sent: one worker alone, with its part of the batch, takes compute + update(1) + input.

All of these are measured with the user's model on the user's machines. Assumptions: each worker
keeps its batch (the global batch grows with N); workers are alike; each machine has its own link,
and switches have enough bandwidth for all links; the number of packs is as measured; the slowest of
N workers is as fast as the mean.
"""

from __future__ import annotations

import dataclasses

PARTS = ("compute", "update", "overhead", "communication", "input")
MEMORY = 4.8e9  # bytes per second of a sum between two workers of one machine, see bench/ring.py

# Of a full Ethernet frame: 1,500 bytes, less headers of IPv4 (20) and of TCP with timestamps (32),
# after a header of 14 (IEEE 802.3, RFC 791, RFC 9293, RFC 7323).
_PAYLOAD = (1500 - 20 - 32) / (1500 + 14)


@dataclasses.dataclass(frozen=True)
class Cost:
    """The parts of one step's time, in seconds, on `workers` workers.

    Attributes:
        workers: number of workers that it was measured on.
        compute: forward and backward pass, and an update of the weights that is not shared.
        communication: all-reduce of the gradients that a step waits for.
        input: waiting for the next batch.
        gradient_bytes: bytes of one worker's gradients on the network.
        latency: seconds of one message between two workers.
        sums: number of all-reduces of one step, one after the other.
        overhead: what the same step takes longer on several workers, though nothing is reduced.
        update: this worker's part of an update that the workers share.
        hidden: all-reduce of the gradients while earlier layers are computed.
        window: how long gradients could travel while earlier layers are computed.
    """

    workers: int
    compute: float
    communication: float
    input: float
    gradient_bytes: int
    latency: float = 0.0
    sums: float = 1.0
    overhead: float = 0.0
    update: float = 0.0
    hidden: float = 0.0
    window: float = 0.0

    @property
    def step(self) -> float:
        """Seconds of one step."""
        return self.compute + self.update + self.overhead + self.communication + self.input

    @property
    def network(self) -> float:
        """Seconds that gradients travel in a step."""
        return self.communication + self.hidden

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the ring; infinite if nothing was sent."""
        n = self.workers
        busy = self.network - self.sums * 2 * (n - 1) * self.latency
        if n == 1 or busy <= 0:
            return float("inf")
        return 2 * (n - 1) / n * self.gradient_bytes / busy

    def on(
        self,
        workers: int,
        bandwidth: float | None = None,
        latency: float | None = None,
        machines: int | None = None,
        processors: float | None = None,
    ) -> Cost:
        """The same on another number of workers, or another network.

        Args:
            bandwidth: bytes of gradients per second, see `payload`; the measured bandwidth is the
                upper limit.
            latency: seconds of one message, in place of the measured latency.
            machines: that have as many workers each; None for one worker on each.
            processors: number of workers that can compute at the same time; None for all. It was so
                when the parts were measured.
        """
        rate = self.bandwidth if bandwidth is None else min(bandwidth, self.bandwidth)
        delay = self.latency if latency is None else latency
        machines = workers if machines is None else machines
        slower = max(1.0, workers / processors) if processors else 1.0
        seconds = _all_reduce(machines, self.gradient_bytes, rate)
        seconds += _all_reduce(workers // machines, self.gradient_bytes, MEMORY)
        seconds += self.sums * 2 * (machines - 1) * delay
        window = slower * self.window
        tail = self.communication / self.network if self.network else 1.0
        exposed = max(seconds - window, tail * seconds)
        return dataclasses.replace(
            self,
            workers=workers,
            compute=slower * self.compute,
            update=slower * self.update * self.workers / workers,
            overhead=slower * self.overhead if workers > 1 else 0.0,
            input=slower * self.input,
            communication=exposed,
            hidden=seconds - exposed,
            window=window,
            latency=delay,
        )

    def efficiency(self) -> float:
        """Examples per second and worker, relative to one worker alone."""
        return (self.compute + self.workers * self.update + self.input) / self.step

    @property
    def bound_by(self) -> str:
        """The largest part of a step."""
        parts = {n: getattr(self, n) for n in PARTS}
        return max(parts, key=parts.__getitem__)


def payload(bits_per_s: float) -> float:
    """Bytes per second that TCP moves over an Ethernet link of this rate."""
    return _PAYLOAD * bits_per_s / 8


def _all_reduce(members: int, nbytes: float, rate: float) -> float:
    return 2 * (members - 1) / members * nbytes / rate


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

MANY = (1, 2, 4, 8, 16, 64, 256, 1024)


def report(cost: Cost, global_batch: int | None, parameters: int, update: str = "") -> str:
    """Lines to print: parts of a step, what bounds it, what to change, and what to expect.

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
    if cost.workers == 1:
        return "\n".join(lines)
    lines += [
        f"the ring reaches {cost.bandwidth / 1e9:.2f} GB/s, one message takes "
        f"{1e6 * cost.latency:.0f} us, a step sums {cost.sums:g} times",
        f"{1000 * cost.hidden:.2f} ms of {1000 * cost.network:.2f} ms that gradients travel are "
        "hidden behind the backward pass",
        "expected on N such workers, each on a machine of its own, with its batch: t(N) = compute "
        "+ update(1)/N + overhead + input + max(network - window, tail), network = 2 (N-1)/N "
        "bytes/bandwidth + sums 2 (N-1) latency",
        f"{'workers':<16} {'ms':>9} {'efficiency':>10}",
    ]
    for workers in MANY:
        there = cost.on(workers)
        lines.append(f"{workers:<16} {1000 * there.step:>9.2f} {there.efficiency():>10.0%}")
    return "\n".join(lines)
