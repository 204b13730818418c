"""The server of a run's elastic rounds: a process beside the tasks, which ends with the launcher.

with served_rounds(workers=4, environ=os.environ) as variables: ...

Where the environment names a server, as on several machines, that one serves.
"""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping

from tfmw.cluster.cluster import MEMBERS, ROUNDS
from tfmw.errors import UsageError

_END_S = 5.0


@contextlib.contextmanager
def served_rounds(workers: int, environ: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """The variables that all tasks get.

    Raises:
        UsageError: the server does not start.
    """
    if environ.get(ROUNDS):
        yield {}
        return
    token = environ.get("TFMW_TOKEN") or secrets.token_hex(32)
    command = [sys.executable, "-m", "tfmw.local_sgd.round_server"]
    with subprocess.Popen(
        [*command, "--members", str(workers), "--host", "127.0.0.1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**environ, "TFMW_TOKEN": token},
        start_new_session=True,  # Ctrl-C ends the tasks first
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            address = server.stdout.readline().strip()
            if not address:
                raise UsageError("the server of the elastic rounds did not start; see above.")
            yield {ROUNDS: address, MEMBERS: str(workers), "TFMW_TOKEN": token}
        finally:
            server.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(_END_S)
            server.kill()
