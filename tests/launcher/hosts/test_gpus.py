"""GPUs of a host are divided between its tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfmw.launcher.hosts.gpus import visible_devices


@pytest.mark.parametrize(
    ("found", "environ", "shares"),
    [
        (4, {}, ["0,1", "2,3"]),
        (11, {}, ["0,1,2,3,4", "5,6,7,8,9"]),  # in the order of numbers
        (2, {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c"}, ["GPU-a", "GPU-b"]),
        (4, {"CUDA_VISIBLE_DEVICES": ""}, [None, None]),
        (1, {}, [None, None]),
        (0, {}, [None, None]),
        (4, {}, [None]),  # one task has all
    ],
)
def test_each_task_has_its_share(
    found: int, environ: dict[str, str], shares: list[str | None], tmp_path: Path
) -> None:
    for name in [f"nvidia{i}" for i in range(found)] + ["nvidiactl", "null"]:
        (tmp_path / name).touch()
    got = [visible_devices(rank, len(shares), environ, tmp_path) for rank in range(len(shares))]
    assert visible_devices(None, 1, environ, tmp_path) == {"CUDA_VISIBLE_DEVICES": ""}
    assert got == [{} if s is None else {"CUDA_VISIBLE_DEVICES": s} for s in shares]
