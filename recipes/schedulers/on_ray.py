"""Trains on a Ray cluster: one actor for each worker, and `tfmw.fit` in each actor.

    python recipes/schedulers/on_ray.py --workers=4 --gpus_per_worker=1 --export_dir=/shared/digits

Without RAY_ADDRESS the script starts Ray on this machine and stops it at the end. Ray places the
workers. tfmw needs their addresses, and a process for each in which TensorFlow has not run yet.
"""

from __future__ import annotations

import argparse
import os
import socket
from pathlib import Path
from typing import Any

import ray


class Worker:
    """One worker of the cluster."""

    def address(self) -> str:
        """The "host:port" of this worker: an address in Ray's network, and a free port."""
        host = ray.util.get_node_ip_address()
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def train(
        self, workers: list[str], index: int, epochs: int, export_dir: str | None
    ) -> dict[str, list[float]]:
        """Joins the cluster and trains; the same on every worker."""
        import tfmw
        from tfmw.launcher.environment import compute_with_onednn

        compute_with_onednn(os.environ)  # as `tfmw run` does, before TensorFlow is imported
        task = {"type": "worker", "index": index}
        tfmw.init({"cluster": {"worker": workers}, "task": task})

        import digits  # in the parent folder; replace it by your model and data

        train_data, test_data = digits.make_data(batch_size=64)
        history = tfmw.fit(
            digits.make_model(),
            train_data,
            epochs=epochs,
            validation_data=test_data,
            export_dir=export_dir,
            verbose=0,
        )
        return {name: list(map(float, values)) for name, values in history.history.items()}


def train(
    workers: int, gpus_per_worker: float, epochs: int, export_dir: str | None
) -> list[dict[str, list[float]]]:
    """Returns `History.history` of each worker, in order."""
    options: dict[str, Any] = {
        "num_gpus": gpus_per_worker,
        "scheduling_strategy": "SPREAD",
        "runtime_env": {"env_vars": {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}},
    }
    actor_class: Any = ray.remote(Worker)
    actors = [actor_class.options(**options).remote() for _ in range(workers)]
    addresses = ray.get([actor.address.remote() for actor in actors])
    return ray.get(
        [
            actor.train.remote(addresses, index, epochs, export_dir)
            for index, actor in enumerate(actors)
        ]
    )


def main() -> None:
    """Trains by the flags."""
    parser = argparse.ArgumentParser(description="Train on a Ray cluster.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus_per_worker", type=float, default=0)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--export_dir")
    flags = parser.parse_args()
    ray.init()
    history = train(flags.workers, flags.gpus_per_worker, flags.epochs, flags.export_dir)
    print(f"validation accuracy: {history[0]['val_accuracy'][-1]:.4f}")


if __name__ == "__main__":
    main()
