"""`on="ray"` from a real notebook kernel that is interrupted, and from one that is killed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tfmw
from tests.engines.contract import TIMEOUT_S, wait_for
from tests.engines.test_kernel import FIRST_CELL, Cell, Kernel
from tests.engines.test_ray import nothing_is_left, two_nodes
from tfmw.engines import Ray

pytestmark = [
    pytest.mark.long,
    pytest.mark.multiprocess,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a cluster of two nodes, which this process looks at as well."""
    with two_nodes() as nodes, pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "RAY_ADDRESS", nodes.address)
        yield nodes.address


@pytest.fixture
def kernel(address: str, tmp_path: Path) -> Iterator[Kernel]:
    kernel = Kernel(tmp_path)
    try:
        first = kernel.run(FIRST_CELL)
        assert first.error is None, first.error
        yield kernel
    finally:
        kernel.close()


def test_interrupted_cell_brings_home_what_was_reached(kernel: Kernel) -> None:
    request = kernel.client.execute(
        "import tfmw.engines.local as local\n"
        "local._BACKUP_OF_JOB_EVERY = 'epoch'\n"
        "tfmw.fit(model, dataset, epochs=100_000, workers=2, on='ray')"
    )
    cell = Cell()
    interrupted = False
    engine = Ray()
    for _ in kernel.messages(request, cell, 200):
        if not interrupted and "Epoch 3/" in cell.stdout:
            wait_for(lambda: any(j.details().get("backup") for j in tfmw.jobs(engine)))
            kernel.manager.interrupt_kernel()
            interrupted = True
    assert cell.error is not None
    assert cell.error["ename"] == "KeyboardInterrupt", cell.error
    kept = re.search(r"stopped; the model has the weights of step (\d+)", cell.stdout)
    assert kept, cell.stdout[-2000:]
    assert "[worker 0" not in cell.stdout, "one live progress bar"
    assert kernel.run("int(model.optimizer.iterations)").value == kept[1]
    wait_for(nothing_is_left)


def test_killed_kernel_leaves_the_job_which_another_process_finds(
    kernel: Kernel, tmp_path: Path
) -> None:
    cell = kernel.run(
        "import time\n"
        "def waits_for_a_file(path):\n"
        "    print('waiting', flush=True)\n"
        "    while not os.path.exists(path): time.sleep(0.1)\n"
        "    return Network.__name__, os.environ['TFMW_TASK']\n"
        "import os\n"
        f"job = tfmw.submit(waits_for_a_file, ({str(tmp_path / 'go')!r},), 2, on='ray',"
        " env={'TFMW_NO_INIT': '1'})\n"
        "job.id"
    )
    job = tfmw.attach(cell.value.strip("'"))
    wait_for(lambda: job.logs().count("waiting") == 2)
    kernel.manager.shutdown_kernel(now=True)
    assert job.status() == "running"
    (tmp_path / "go").touch()
    assert job.result(TIMEOUT_S) == [("Network", "worker 0"), ("Network", "worker 1")]
    job.forget()
    wait_for(nothing_is_left)
