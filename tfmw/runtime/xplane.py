"""Events of all tasks in the format of TensorBoard's profiler, which is of Protocol Buffers.

    write(Path("traces"), {"worker 0": {"steps": [("step 3", 51.2, 0.012), ...], "input": [...]}})
    # tensorboard --logdir traces

The launcher imports no TensorFlow, so the few fields that the profiler needs are encoded here.
Format: tensorflow/tsl/profiler/protobuf/xplane.proto; protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

Rows = Mapping[str, Sequence[tuple[str, float, float]]]  # row -> (name, begin, seconds)

FILE = "plugins/profile/tfmw/workers.xplane.pb"
"""Where TensorBoard looks for it, in the directory of its logs."""

# Numbers of fields, by message.
_SPACE_PLANES = 1
_PLANE_ID, _PLANE_NAME, _PLANE_LINES, _PLANE_EVENT_METADATA = 1, 2, 3, 4
_LINE_ID, _LINE_NAME, _LINE_TIMESTAMP_NS, _LINE_EVENTS = 1, 2, 3, 4
_EVENT_METADATA_ID, _EVENT_OFFSET_PS, _EVENT_DURATION_PS = 1, 2, 3
_METADATA_ID, _METADATA_NAME = 1, 2
_KEY, _VALUE = 1, 2  # of an entry of a map

_OTHER_DEVICE = "/device:CUSTOM:"  # the profiler shows planes of such names, each as a process


def write(folder: Path, tasks: Mapping[str, Rows]) -> None:
    """Writes the events of all tasks where TensorBoard looks for them."""
    path = folder / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    planes = [_plane(number, task, rows) for number, (task, rows) in enumerate(tasks.items())]
    path.write_bytes(b"".join(_field(_SPACE_PLANES, plane) for plane in planes))


def _plane(number: int, task: str, rows: Rows) -> bytes:
    names = sorted({name for events in rows.values() for name, _, _ in events})
    ids = {name: number for number, name in enumerate(names, 1)}
    plane = _field(_PLANE_ID, number) + _field(_PLANE_NAME, _OTHER_DEVICE + task)
    for line, (row, events) in enumerate(rows.items(), 1):
        plane += _field(_PLANE_LINES, _line(line, row, events, ids))
    for name, key in ids.items():
        metadata = _field(_METADATA_ID, key) + _field(_METADATA_NAME, name)
        entry = _field(_KEY, key) + _field(_VALUE, metadata)
        plane += _field(_PLANE_EVENT_METADATA, entry)
    return plane


def _line(
    number: int, row: str, events: Sequence[tuple[str, float, float]], ids: Mapping[str, int]
) -> bytes:
    first = min((begin for _, begin, _ in events), default=0.0)
    line = _field(_LINE_ID, number) + _field(_LINE_NAME, row)
    line += _field(_LINE_TIMESTAMP_NS, round(1e9 * first))
    for name, begin, seconds in events:
        event = _field(_EVENT_METADATA_ID, ids[name])
        event += _field(_EVENT_OFFSET_PS, round(1e12 * (begin - first)))
        event += _field(_EVENT_DURATION_PS, round(1e12 * seconds))
        line += _field(_LINE_EVENTS, event)
    return line


def _field(number: int, value: int | str | bytes) -> bytes:
    """A field: a variable-length integer, or the length of bytes and these."""
    if isinstance(value, int):
        return _integer(number << 3) + _integer(value)
    data = value.encode() if isinstance(value, str) else value
    return _integer(number << 3 | 2) + _integer(len(data)) + data


def _integer(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
