"""`on="slurm"` in cells of real notebook kernels; see `kernels`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.contract import wait_for
from tests.engines.kernels import KernelContract, OutlivesKernel
from tests.engines.test_kernel import Kernel
from tests.helpers.slurm import OneMachine
from tfmw.engines import Slurm

pytestmark = [pytest.mark.nightly, pytest.mark.process]


class TestSlurmKernel(OutlivesKernel, KernelContract):
    on = "tfmw.engines.Slurm(directory='jobs', nodes=2, options=('--mem=0',))"

    @pytest.fixture
    def engine(self, slurm: OneMachine, tmp_path: Path) -> Slurm:
        self.slurm = slurm
        return Slurm(directory=tmp_path / "jobs")  # the kernel's working directory

    def wait_until_nothing_is_left(self, kernel: Kernel) -> None:
        wait_for(lambda: not self.slurm.run("squeue", "--noheader").stdout.strip())
