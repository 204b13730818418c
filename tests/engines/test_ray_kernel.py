"""`on="ray"` in cells of real notebook kernels; see `kernels`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.engines.contract import wait_for
from tests.engines.kernels import KernelContract, OutlivesKernel
from tests.engines.test_kernel import Kernel
from tests.engines.test_ray import nothing_is_left, two_nodes
from tfmw.engines import Ray

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Address of a cluster of two nodes, which this process reads as well."""
    with two_nodes() as nodes, pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "RAY_ADDRESS", nodes.address)
        yield nodes.address


class TestRayKernel(OutlivesKernel, KernelContract):
    on = "'ray'"

    @pytest.fixture
    def engine(self, address: str) -> Ray:
        return Ray()

    def wait_until_nothing_is_left(self, kernel: Kernel) -> None:
        wait_for(nothing_is_left)
