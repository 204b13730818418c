"""Every notebook runs in a real kernel, and shows what its text says."""

from __future__ import annotations

import functools
import re
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import nbformat
import pytest

from notebooks.execute import NOTEBOOKS, execute, readable
from tests.helpers.cases import each
from tests.helpers.cluster import ROOT
from tfmw.launcher.output import without_notices

# In the order of their links.
NAMES = ["first_fit", "before_and_after", "many_workers", "data_from_files", "custom_training"]
NAMES += [
    "transfer_learning",
    "speed_up",
    "reading_a_benchmark",
    "slow_network",
    "surviving_a_crash",
    "two_hosts",
]
NAMES += ["parameter_servers", "large_tables", "on_a_cluster"]


def text_of(notebook: Any) -> str:
    """All that a notebook's cells have printed."""
    outputs = [o for c in notebook.cells if c.cell_type == "code" for o in c.outputs]
    return "\n".join(o.text for o in outputs if o.output_type == "stream")


def plots_of(notebook: Any) -> int:
    outputs = [o for c in notebook.cells if c.cell_type == "code" for o in c.outputs]
    return sum("image/png" in o.get("data", {}) for o in outputs)


def numbers(pattern: str, text: str) -> list[float]:
    found = [float(n) for n in re.findall(pattern, text)]
    assert found, f"{pattern} is not in:\n{text}"
    return found


# Asserted of a run of now, and of the outputs that are committed.


def shows_first_fit(text: str) -> None:
    (here,) = numbers(r"accuracy in this kernel +([\d.]+)", text)
    (there,) = numbers(r"accuracy on the workers +([\d.]+)", text)
    assert here == there > 0.9
    assert re.search(r"updates by the optimizer +184 in 8 epochs", text)  # 8 x 23 batches
    assert text.count("Epoch ") == text.count("23/23") == 8, "one bar for each epoch"
    assert "holds Python functions (PyFunc)" in text
    assert "pass a callable that builds it in each process" in text


def shows_before_and_after(text: str) -> None:
    (apart,) = numbers(r"differ from those of plain Keras by at most ([\de.-]+)", text)
    assert apart < 1e-5
    ((noisy, denoised),) = re.findall(r"noisy ([\d.]+) dB, denoised ([\d.]+) dB", text)
    (alone,) = numbers(r"with plain Keras ([\d.]+) dB", text)
    assert float(denoised) > float(noisy) + 3
    assert abs(alone - float(denoised)) < 0.2
    assert len(numbers(r" ([\d.]+) s for 6 epochs", text)) == 4


def shows_many_workers(text: str) -> None:
    (examples, last) = re.findall(r"(\d+) examples: the last batch has (\d+)", text)[0]
    assert int(examples) % 50 == int(last) > 0
    assert len(numbers(r"\d workers: losses differ by ([\de.-]+)", text)) == 2
    assert max(numbers(r"losses differ by ([\de.-]+)", text)) < 1e-5
    assert max(numbers(r"weights by ([\de.-]+)", text)) < 1e-3


def shows_surviving_a_crash(text: str) -> None:
    assert text.count("worker 1 is replaced (not counted as a restart)") == 1
    assert re.search(r"restart\): it failed in attempt 0 after [\d.]+ s.*SIGKILL", text)
    hashes = re.findall(r"weights on the workers: (\w{16}) (\w{16})", text)
    assert len(hashes) == 2
    assert len({h for pair in hashes for h in pair}) == 1
    (end,) = numbers(r"worker 1 was killed after step (\d+)", text)
    (begin,) = numbers(r"both continued with step (\d+)", text)
    assert 1 < begin <= end + 1 == 43
    assert "same weights, bit for bit: True" in text


def shows_parameter_servers(text: str) -> None:
    (table,) = numbers(r"table ([\d.]+) MB", text)
    (rows,) = numbers(r"rows of a step ([\d.]+) kB", text)
    assert table * 1000 > 100 * rows, "a step touches little of the table"
    (alone,) = numbers(r"accuracy of one process +([\d.]+)", text)
    (servers,) = numbers(r"accuracy with servers +([\d.]+)", text)
    assert 0.95 > servers > 0.7
    assert abs(alone - servers) < 0.05


def shows_large_tables(text: str) -> None:
    assert "<Table users/embeddings: float32 [1200000, 32], 0.2 GB on 2 parameter servers>" in text
    (servers,) = numbers(r"tables and slots on the servers (\d+) MB", text)
    (coordinator,) = numbers(r"the coordinator took at most +(\d+) MB", text)
    assert servers == 366
    assert 0 < coordinator < 250
    ((first, last),) = re.findall(
        r"accuracy ([\d.]+) in the first epoch, ([\d.]+) in the last", text
    )
    assert 0.5 < float(first) < float(last) - 0.05
    full, *_, last_backup = numbers(r"of which +(\d+) MB are new", text)
    assert full > servers - 1
    assert last_backup < full / 4
    (rows,) = numbers(r"tables in the export +(\d+) MB", text)
    (grew,) = numbers(r"the process grew by +(\d+) MB", text)
    assert grew < rows / 2
    assert "as the coordinator predicted, to float32's rounding: True" in text


def shows_reading_a_benchmark(text: str) -> None:
    ((alone, half),) = re.findall(r"one worker +([\d.]+) ms for 256 .*, ([\d.]+) ms for 128", text)
    (both,) = numbers(r"two workers +([\d.]+) ms", text)
    (ratio,) = numbers(r": ([\d.]+) times as fast", text)
    (exchange,) = numbers(r"of that exchange +([\d.]+) ms", text)
    assert min(numbers(r"all cores +([\d.]+) ms", text)) > 0
    # Times depend on this machine; the figures derived from them do not.
    assert min(float(half), float(alone), both) > 0
    assert ratio == pytest.approx(float(alone) / both, abs=0.05)
    assert exchange == pytest.approx(max(both - float(half), 0), abs=0.2)


def shows_data_from_files(text: str) -> None:
    assert "1437 examples in 4 files" in text
    (apart,) = numbers(r"losses differ by ([\de.-]+)", text)
    assert apart < 1e-5
    (updates,) = numbers(r"updates by the optimizer +(\d+) in 4 epochs", text)
    assert updates == 4 * 23
    (accuracy,) = numbers(r"accuracy on the files +([\d.]+)", text)
    assert accuracy > 0.9


def shows_custom_training(text: str) -> None:
    (step,) = numbers(r"losses of the train_step differ by ([\de.-]+)", text)
    (loop,) = numbers(r"losses of the loop differ by ([\de.-]+)", text)
    assert step < 1e-5
    assert loop < 1e-4
    assert "both tasks have the same losses: True" in text


def shows_transfer_learning(text: str) -> None:
    assert "first task: 719 images; second task: 50 to train on, 668 to test" in text
    frozen, tuned = numbers(r"differ from those of one process by ([\de.-]+)", text)
    assert max(frozen, tuned) < 1e-5
    assert "the weights and averages of the base are unchanged: True" in text
    pattern = r"(?:head|fine-tuned|scratch) +accuracy ([\d.]+) on 668 images"
    head, fine_tuned, untrained, _ = numbers(pattern, text)
    assert min(head, fine_tuned) > untrained + 0.1


def shows_speed_up(text: str) -> None:
    pattern = r"one worker +([\d.]+) ms, two workers +([\d.]+) ms, all cores +([\d.]+) ms"
    lines = re.findall(pattern, text)
    assert len(lines) == 3
    assert all(float(ms) > 0 for line in lines for ms in line)
    assert (
        len(numbers(r"two workers are ([\d.]+) times as fast as one process with all", text)) == 3
    )


def shows_slow_network(text: str) -> None:
    assert "30 steps in an epoch" in text
    found = re.findall(r": loss +([\d.]+) after +([\d.]+) MB, +(\d+) s", text)
    losses, sent, _ = (list(map(float, column)) for column in zip(*found, strict=True))
    assert len(losses) == 4
    assert max(losses) < 0.5
    assert sent[0] > 100 * sent[-1]
    assert abs(losses[3] - losses[2]) < 0.05, "8 bits change little"


def shows_two_hosts(text: str) -> None:
    assert "exit statuses of both hosts: [0, 0]" in text
    assert "138 steps, all of them on 2 hosts" in text  # 6 x 23 batches
    assert "exit status of the first host: 0" in text
    ((last, first, end),) = re.findall(
        r"steps 1 to (\d+) on two hosts, (\d+) to (\d+) on one", text
    )
    assert 20 <= int(last) == int(first) - 1 < int(end) == 138
    (apart,) = numbers(r"differ from those without the fault by ([\de.-]+)", text)
    assert apart < 1e-4


def shows_on_a_cluster(
    text: str, where: str = r"job ray:\w+ on the Ray cluster at \S+:\d+"
) -> None:
    (accuracy,) = numbers(r"accuracy on the test data ([\d.]+)", text)
    assert 1 > accuracy > 0.8
    assert text.count("Epoch ") == 5, "one bar for each epoch, without labels"
    assert re.search(where, text)
    assert "updates by the optimizer 115 in 5 epochs" in text  # 5 x 23 batches
    assert "jobs on the cluster: []" in text
    assert "[(42, 'worker 0'), (42, 'worker 1')] done" in text
    assert "'saved_model.pb'" in text


PLOTS = {"first_fit": 2, "on_a_cluster": 0}  # one, where no other number is given
SHOWS = {name: globals()[f"shows_{name}"] for name in NAMES}


@functools.cache
def committed(name: str) -> Any:
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)


def run(name: str) -> None:
    notebook = execute(ROOT / "notebooks" / f"{name}.ipynb")
    SHOWS[name](text_of(notebook))
    assert plots_of(notebook) == PLOTS.get(name, 1)


@pytest.mark.nightly
@pytest.mark.process
def test_first_fit() -> None:
    run("first_fit")


@pytest.mark.process
@pytest.mark.nightly
def test_before_and_after() -> None:
    run("before_and_after")


@pytest.mark.process
@pytest.mark.nightly
def test_many_workers() -> None:
    run("many_workers")


@pytest.mark.process
@pytest.mark.nightly
def test_surviving_a_crash() -> None:
    run("surviving_a_crash")


@pytest.mark.process
@pytest.mark.nightly
def test_parameter_servers() -> None:
    run("parameter_servers")


@pytest.mark.nightly
@pytest.mark.process
def test_data_from_files() -> None:
    run("data_from_files")


@pytest.mark.nightly
@pytest.mark.process
def test_custom_training() -> None:
    run("custom_training")


@pytest.mark.nightly
@pytest.mark.process
def test_transfer_learning() -> None:
    run("transfer_learning")


@pytest.mark.nightly
@pytest.mark.process
def test_speed_up() -> None:
    run("speed_up")


@pytest.mark.nightly
@pytest.mark.process
def test_slow_network() -> None:
    run("slow_network")


@pytest.mark.nightly
@pytest.mark.process
def test_two_hosts() -> None:
    run("two_hosts")


@pytest.mark.nightly
@pytest.mark.process
def test_large_tables() -> None:
    run("large_tables")


@pytest.mark.nightly
@pytest.mark.process
def test_reading_a_benchmark() -> None:
    run("reading_a_benchmark")


@pytest.mark.nightly
@pytest.mark.process
def test_on_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    # The names of Ray's sockets may have 107 bytes.
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as short:
        monkeypatch.setenv("RAY_TMPDIR", short)
        run("on_a_cluster")


def test_every_notebook_is_run() -> None:
    assert sorted(path.stem for path in NOTEBOOKS) == sorted(NAMES)
    assert all(f"test_{name}" in globals() for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_committed_outputs_match(name: str) -> None:
    SHOWS[name](text_of(committed(name)))
    assert plots_of(committed(name)) == PLOTS.get(name, 1)


@pytest.mark.parametrize("name", NAMES)
def test_committed_outputs_are_of_one_complete_run(name: str) -> None:
    cells = [cell for cell in committed(name).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not any(o.output_type == "error" for cell in cells for o in cell.outputs)


@pytest.mark.parametrize("name", NAMES)
def test_committed_outputs_name_no_machine(name: str) -> None:
    text = text_of(committed(name))
    assert not re.search(r"(?<![\w.~])/(?:home|root|work|tmp|usr|opt|var|mnt|data)/", text)
    assert str(Path.home()) not in text
    assert without_notices(text) == text
    assert not re.search("[\r\b\x1b]", text), "overwritten, or coloured"


@pytest.mark.parametrize("name", NAMES)
def test_it_begins_with_goals_and_set_up(name: str) -> None:
    first = committed(name).cells[0].source
    assert re.match(r"# .+\n\n\*\*Goals\.\*\* You .+\n\n\*\*Set-up\.\*\* Linux", first, re.DOTALL)


def test_pictures_have_alternative_text() -> None:
    cells = [cell for name in NAMES for cell in committed(name).cells]
    for cell in each(c for c in cells if "image/png" in str(c.get("outputs", ""))):
        assert len(cell.metadata["mystnb"]["image"]["alt"]) > 40


def test_each_links_to_the_next() -> None:
    for name, following in each(pairwise(NAMES)):
        ends = [cell.source for cell in committed(name).cells if cell.cell_type == "markdown"]
        assert re.search(rf"\*Next:\* \[[^]]+\]\({following}\.ipynb\)$", ends[-1]), name


def test_outputs_are_cleaned() -> None:
    bar = "\r\x1b[1m1/2\x1b[0m - loss: 3\b\b\b\r\x1b[1m2/2\x1b[0m - loss: 1\n"
    notice = "WARNING: All log messages before absl::InitializeLog() is called are written to X\n"
    warning = (
        "./tqdm/auto.py:21: TqdmWarning: IProgress not found.\n  from .autonotebook import tqdm\n"
    )
    outputs = [
        nbformat.v4.new_output("stream", name="stderr", text=notice + warning),
        nbformat.v4.new_output("stream", name="stdout", text="Epoch 1\n"),
        nbformat.v4.new_output("stream", name="stdout", text=bar),
        nbformat.v4.new_output("stream", name="stdout", text=f"in {ROOT}/tfmw\n"),
        nbformat.v4.new_output("stream", name="stderr", text=f"tfmw: restored\n{warning}"),
    ]
    output, own = readable(outputs)
    assert output.text == "Epoch 1\n2/2 - loss: 1\nin ./tfmw\n"
    assert own.text == "tfmw: restored\n"
