"""Elastic rounds over machines: a cable is cut, the others continue, and it is put back."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cluster import PROGRAMS, PYTHONPATH
from tests.helpers.network import Machines
from tests.programs.elastic import X

EPOCHS = 40


@pytest.mark.nightly
def test_a_member_behind_a_cut_link_is_left_out_until_it_is_back(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    environ = {
        **os.environ,
        "PYTHONPATH": PYTHONPATH,
        "TFMW_RESULT": str(tmp_path / "results"),
        "TFMW_TOKEN": "a secret of this test",
        "TFMW_MEMBERS": "3",
    }
    with contextlib.ExitStack() as stack:
        machines = stack.enter_context(Machines(2, tmp_path))

        def start(command: list[str], on: int | None, **added: str) -> subprocess.Popen[str]:
            before = [] if on is None else machines.command(on)
            process = subprocess.Popen(
                [*before, sys.executable, *command],
                env=environ | added,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.callback(process.kill)
            return process

        command = ["-m", "tfmw.train.local_sgd.round_server", "--members", "3"]
        server = start([*command, "--host", machines.gateway], None)
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        run = ["-m", "tfmw", "run", "--elastic", "--max-restarts", "30", "--workers"]
        program = [str(PROGRAMS / "elastic.py"), "lose", f"epochs={EPOCHS}"]
        members = {
            0: start([*run, "2", *program], 0, TFMW_ROUNDS=address, TFMW_MEMBER="0"),
            1: start([*run, "1", *program], 1, TFMW_ROUNDS=address, TFMW_MEMBER="2"),
        }
        wait_for_rounds(tmp_path, members, 6, of_members=3)
        machines.unplug(1)
        wait_for_rounds(tmp_path, members, 6, of_members=2)
        machines.plug(1)
        output = {
            number: process.communicate(timeout=200)[0] for number, process in members.items()
        }
        assert [p.returncode for p in members.values()] == [0, 0], output
        server.terminate()
        server.communicate(timeout=20)
    ended = [rounds(tmp_path, member) for member in range(3)]
    numbers = collections.Counter(n for of_one in ended for _, _, some in of_one for n in some)
    assert numbers == dict.fromkeys(range(len(X)), EPOCHS)
    assert "alone: it failed" not in output[0]
    assert "the server of rounds at" in output[1]
    assert ended[0][-1][0] == 3, "it came back"


def rounds(folder: Path, member: int) -> list[Any]:
    """[members, examples, numbers of this one's examples] of each round that has ended."""
    path = folder / f"ended_{member}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def wait_for_rounds(
    folder: Path, members: dict[int, subprocess.Popen[str]], count: int, of_members: int
) -> None:
    deadline = time.monotonic() + 120
    while sum(n == of_members for n, _, _ in rounds(folder, 0)) < count:
        assert time.monotonic() < deadline, [rounds(folder, m)[-3:] for m in range(3)]
        assert members[0].poll() is None, members[0].communicate()[0]
        time.sleep(0.1)
