"""The memory limit of containers: files as the kernel shows them."""

from __future__ import annotations

import os

import pytest

from tfmw.cluster import joining, memory

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
MB = 1 << 20
NO_LIMIT = str(2**63 - 4096)


def v1(mount_root: str = "/") -> str:
    return f"36 31 0:30 {mount_root} {{at}}/cpu rw - cgroup cgroup rw,cpu\n" + (
        f"35 31 0:32 {mount_root} {{at}} rw,relatime - cgroup cgroup rw,memory\n"
    )


def v2(mount_root: str = "/") -> str:
    return f"29 23 0:26 {mount_root} {{at}} rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


@pytest.mark.parametrize(
    ("groups", "mounts", "files", "expected"),
    [
        ("0::/\n", v2(), {"memory.max": "max\n"}, MACHINE),
        ("0::/\n", v2(), {"memory.max": f"{64 * MB}\n"}, 64 * MB),
        ("0::/\n", v2(), {}, MACHINE),  # the root group has no such file
        ("0::/a/b\n", v2(), {"a/b/memory.max": "max", "a/memory.max": f"{32 * MB}"}, 32 * MB),
        ("0::/a/b\n", v2(), {"a/b/memory.max": f"{8 * MB}", "a/memory.max": f"{9 * MB}"}, 8 * MB),
        ("0::/docker/4f\n", v2("/docker/4f"), {"memory.max": f"{5 * MB}"}, 5 * MB),
        ("0::/../other\n", v2(), {"memory.max": f"{5 * MB}"}, 5 * MB),
        ("0::/docker/4f\n", v2("/docker/other"), {"memory.max": f"{5 * MB}"}, 5 * MB),
        (
            "5:cpu:/\n4:memory:/docker/4f\n0::/\n",
            v1(),
            {"docker/4f/memory.limit_in_bytes": f"{7 * MB}", "memory.limit_in_bytes": NO_LIMIT},
            7 * MB,
        ),
        ("4:cpu,memory:/a\n", v1("/a"), {"memory.limit_in_bytes": f"{6 * MB}"}, 6 * MB),
        ("4:memory:/\n", v1(), {"memory.limit_in_bytes": NO_LIMIT}, MACHINE),
        ("5:cpu:/a\n", v1(), {"a/memory.limit_in_bytes": f"{7 * MB}"}, MACHINE),
        ("", "", {}, MACHINE),
    ],
)
def test_the_least_limit_counts(tmp_path, groups, mounts, files, expected):
    at = tmp_path / "mounted"
    for name, text in files.items():
        (at / name).parent.mkdir(parents=True, exist_ok=True)
        (at / name).write_text(text)
    (tmp_path / "cgroup").write_text(groups)
    (tmp_path / "mountinfo").write_text(mounts.format(at=at))
    assert memory.usable_bytes(tmp_path) == expected


def test_a_system_without_control_groups(tmp_path):
    assert memory.usable_bytes(tmp_path) == MACHINE


def test_tensorflow_gets_the_limit(monkeypatch):
    monkeypatch.delenv("TF_CPU_ALLOCATOR_USE_BFC", raising=False)
    monkeypatch.delenv("TF_CPU_BFC_MEM_LIMIT_IN_MB", raising=False)
    monkeypatch.setattr(joining, "usable_bytes", lambda: 512 * MB)
    joining._reuse_freed_memory()
    assert os.environ.pop("TF_CPU_ALLOCATOR_USE_BFC") == "true"
    assert os.environ.pop("TF_CPU_BFC_MEM_LIMIT_IN_MB") == "512"
