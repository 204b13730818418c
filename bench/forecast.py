"""The time of a step on N workers, or on another network, from one measurement of a few.

    python -m bench.forecast [--workers 2] [--steps 20] FILE.py:FUNCTION    # as for `tfmw bench`

    t(N) = compute + update(N) + overhead + input + exposed(N)
    network(N) = 2 (M - 1) / M * bytes / bandwidth  +  sums * 2 (M - 1) * latency
    exposed(N) = max(network(N) - window, tail * network(N))

The second line is a ring all-reduce between M machines (Patarasuk and Yuan, Bandwidth Optimal
All-reduce Algorithms for Clusters of Workstations, 2009): 2 (M - 1) messages of bytes / M each, and
as many again for each bucket of gradients (`sums`). With several workers on each machine there is
another one among those, at the speed of memory; with one worker on each, M is N.

Gradients travel while earlier layers are still computed, at most for the `window` that this takes;
the last ones cannot, and that part of network(N), `tail`, is as measured. An update that workers
shard takes 1/N of its time. `overhead` is the extra time of a step among several workers before
anything is sent. One worker alone, with its shard of the batch, takes compute + update(1) + input.

All of these are measured with the user's model on the user's machines. Assumptions: each worker
keeps its batch (the global batch grows with N); workers are alike; each machine has its own link,
and switches have enough bandwidth for all links; the number of buckets is as measured; the slowest
of N workers is as fast as the mean.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self
from unittest import mock

from tfmw.cli import bench
from tfmw.cli.bench import Cost
from tfmw.launcher.run import launch

MANY = (1, 2, 4, 8, 16, 64, 256, 1024)
MEMORY = 4.8e9  # bytes per second of a sum between two workers of one machine, see bench/ring.py
MESSAGES = 50
GRADIENTS = ("gradients", "gather")
WEIGHTS = "weights"

# Share of the payload in a full Ethernet frame. It has 1,500 bytes, less headers of IPv4 (20) and
# of TCP with timestamps (32), after a header of 14. See IEEE 802.3, RFC 791, RFC 9293, RFC 7323.
_PAYLOAD = (1500 - 20 - 32) / (1500 + 14)


@dataclasses.dataclass(frozen=True)
class Forecast(Cost):
    """The parts of one step's time, and what they depend on.

    Attributes:
        gradient_bytes: bytes of one worker's gradients on the network.
        latency: seconds of one message between two workers.
        sums: number of all-reduces of one step, one after the other.
        hidden: all-reduce of the gradients while earlier layers are computed.
        window: how long gradients could travel while earlier layers are computed.
    """

    gradient_bytes: int = 0
    latency: float = 0.0
    sums: float = 1.0
    hidden: float = 0.0
    window: float = 0.0

    @property
    def network(self) -> float:
        """Seconds that gradients travel in a step, hidden or not."""
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
    ) -> Forecast:
        """The same on another number of workers, or another network.

        Args:
            bandwidth: bytes of gradients per second, see `payload`; the measured bandwidth is the
                upper limit.
            latency: seconds of one message, in place of the measured latency.
            machines: number of machines, with as many workers each; None for one worker on each.
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

    def with_rounds(self, every: int, parameters: int) -> Self:
        """See `Cost.with_rounds`; nothing is hidden behind the steps."""
        rounds = super().with_rounds(every, parameters)
        return dataclasses.replace(rounds, hidden=0.0, window=0.0)

    def efficiency(self) -> float:
        """Examples per second and worker, relative to one worker alone."""
        return (self.compute + self.workers * self.update + self.input) / self.step


def payload(bits_per_s: float) -> float:
    """Bytes per second that TCP moves over an Ethernet link of this rate."""
    return _PAYLOAD * bits_per_s / 8


def _all_reduce(members: int, nbytes: float, rate: float) -> float:
    return 2 * (members - 1) / members * nbytes / rate


class Span(NamedTuple):
    """One operation of a ring.

    Attributes:
        what: its kind.
        begin, end: in seconds of one clock.
    """

    what: str
    begin: float
    end: float


@contextlib.contextmanager
def exchanges_of(ring: Any) -> Iterator[list[Span]]:
    """Yields a list that gets a `Span` for each operation of a ring; empty without a ring."""
    spans: list[Span] = []
    if ring is None:
        yield spans
        return
    exchange = ring._exchange

    @contextlib.contextmanager
    def timed(what: str) -> Iterator[None]:
        begin = time.perf_counter()
        with exchange(what):
            yield
        spans.append(Span(what, begin, time.perf_counter()))

    with mock.patch.object(ring, "_exchange", timed):
        yield spans


def overlap(spans: Sequence[Span], steps: int, exposed: float) -> tuple[float, float]:
    """Time of the gradients' all-reduce that computation hides, and how much it could hide.

    Args:
        spans: all operations of the ring in these steps.
        steps: their number.
        exposed: seconds that a step takes longer because of communication.

    Returns:
        (hidden, window), in seconds of a step: the time of its ring operations beyond `exposed`,
        and that time plus the gaps in which the ring waits for the next gradients. Medians over the
        steps.
    """
    found = [span for span in spans if span.what in (*GRADIENTS, WEIGHTS)]
    each, rest = divmod(len(found), steps)
    if not each or rest:
        return 0.0, 0.0
    of_steps = [found[first : first + each] for first in range(0, len(found), each)]
    travel = statistics.median(sum(s.end - s.begin for s in step) for step in of_steps)
    gaps = statistics.median(
        sum(
            after.begin - before.end
            for before, after in itertools.pairwise(step)
            if after.what in GRADIENTS
        )
        for step in of_steps
    )
    hidden = max(0.0, travel - exposed)
    return hidden, hidden + gaps


def measure(target: str, steps: int) -> Forecast:
    """Measures the parts of a step, over TCP, and what they depend on; called by each worker.

    Args:
        target: the same as in `tfmw bench`.
        steps: number of steps of a timed epoch.
    """
    import numpy as np

    from tfmw import strategies
    from tfmw.train.mirrored.collectives import listener
    from tfmw.train.mirrored.collectives.connection import ring_of

    os.environ[listener.SHARED_MEMORY] = "0"  # the forecast is for workers on several machines
    cost = bench.measure(target, steps)[0]
    strategy = strategies.current_strategy()
    ring = ring_of(strategy)
    model, dataset, options = bench.parts(bench.load(target)(), target)
    before, made = _reductions(ring), (bench.ROUNDS + bench.WARM_UP) * steps
    with exchanges_of(ring) as spans:
        bench.seconds(model, dataset, options, steps)
    sums = (_reductions(ring) - before) / made if ring is not None else 1.0
    hidden, window = overlap(spans, made, cost.communication)
    parameters = sum(int(np.prod(w.shape)) for w in model.trainable_weights)
    return Forecast(
        **dataclasses.asdict(cost),
        gradient_bytes=parameters * (2 if options.get("gradient_compression") else 4),
        latency=_latency(strategy),
        sums=sums,
        hidden=hidden,
        window=window,
    )


def _reductions(ring: Any) -> int:
    """Number of reductions of gradients so far, dense and sparse; 0 if TensorFlow reduces them."""
    return 0 if ring is None else ring.counts["gradients"] + ring.counts["gather"]


def _latency(strategy: Any) -> float:
    """Seconds of one message of a ring: an all-reduce of one value takes 2 (N - 1) of them."""
    import tensorflow as tf

    from tfmw.train.mirrored.collectives.reduction import Reduction

    replicas = strategy.num_replicas_in_sync
    if replicas == 1:
        return 0.0
    reduction = Reduction(strategy)

    @tf.function(autograph=False)
    def reduce_many() -> Any:
        def one() -> Any:
            value = tf.constant(1.0)
            for _ in range(MESSAGES):
                value = reduction([value])[0] / replicas
            return value

        return strategy.run(one)

    reduce_many()
    begin = time.perf_counter()
    reduce_many()
    return (time.perf_counter() - begin) / MESSAGES / (2 * (replicas - 1))


def report(there: Forecast) -> str:
    """Lines to print: the network as measured, and a step on more workers."""
    lines = [
        f"the ring reaches {there.bandwidth / 1e9:.2f} GB/s, one message takes "
        f"{1e6 * there.latency:.0f} us, a step sums {there.sums:g} times",
        f"{1000 * there.hidden:.2f} ms of {1000 * there.network:.2f} ms that gradients travel are "
        "hidden behind the backward pass",
        f"{'workers':<16} {'ms':>9} {'efficiency':>10}",
    ]
    for workers in MANY:
        one = there.on(workers)
        lines.append(f"{workers:<16} {1000 * one.step:>9.2f} {one.efficiency():>10.0%}")
    return "\n".join(lines)


def main() -> None:
    """Measures on workers of this machine, and prints."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    flags.add_argument("target", metavar="FILE.py:FUNCTION")
    flags.add_argument("--workers", type=int, default=2)
    flags.add_argument("--steps", type=int, default=20)
    options = flags.parse_args()
    print(report(launch(measure, (options.target, options.steps), options.workers)[0]))


if __name__ == "__main__":
    main()
