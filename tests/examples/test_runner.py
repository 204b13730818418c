"""The runner of examples, on results and an example that are made here: nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.examples import __main__ as runner
from tests.examples.program import handed_over

EXAMPLE = runner.Example("one", "owner/name", "c0ffee", "one.py")
KERAS = runner.Run({"0_fit/logs/loss": np.array([2.0, 1.0])}, [], "")


def worker(loss: float, *warnings: str, error: str = "") -> list[runner.Run]:
    return [runner.Run({"0_fit/logs/loss": np.array([2.0, loss])}, list(warnings), error)] * 2


def entry(**facts: str) -> runner.Example:
    return runner.Example("one", "owner/name", "c0ffee", "one.py", **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("example", "workers", "holds", "text"),
    [
        (EXAMPLE, worker(1.0), True, "equal"),
        (EXAMPLE, worker(1.1), False, "SILENTLY"),
        (EXAMPLE, worker(1.1, "tfmw: the loss pairs"), False, "AND SAYS"),
        (EXAMPLE, worker(1.0, "tfmw: the loss pairs"), False, "AND A WARNING"),
        (EXAMPLE, worker(1.0, error="ValueError: no"), False, "FAILS: ValueError"),
        (entry(differs="pairs"), worker(1.1, "tfmw: the loss pairs"), True, "warned"),
        (entry(differs="pairs"), worker(1.1), False, "SILENTLY"),
        (entry(differs="pairs"), worker(1.0), False, "though its entry"),
        (entry(differs="no"), worker(1.0, error="UsageError: no"), True, "refused"),
    ],
)
def test_no_silent_difference_holds(example, workers, holds, text) -> None:
    verdict = runner.Verdict.of(example, KERAS, workers)
    assert verdict.holds is holds
    assert text in verdict.text


def test_an_edit_fits_one_place() -> None:
    example = runner.Example("one", "o/n", "c", "p", edits=(("a = <...>2", "a = 3"),), cut="end")
    assert example.edited("a = 1 +\n 2\nb\nend\nc") == "a = 3\nb\n"
    for source in ("a = 1", "a = 2\na = 2\nend"):
        with pytest.raises(ValueError, match="places, not one"):
            example.edited(source)


def test_calls_of_keras_become_calls_of_tfmw() -> None:
    assert handed_over("h = model.fit(x, y)") == "h = tfmw.fit(model, x, y)"
    assert handed_over("self.model.predict(x)") == "self.model.predict(x)"
    assert handed_over("scaler.fit_transform(x)") == "scaler.fit_transform(x)"


def test_a_checkout_serves_in_place_of_a_download(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("print()")
    assert runner.fetched(EXAMPLE, tmp_path) == "print()"


def test_the_table_links_the_source_of_each_verdict() -> None:
    text = runner.table({"one": EXAMPLE}, {"one": runner.Verdict(True, "equal, 1e-16, 2 calls")})
    link = "[one](https://github.com/owner/name/blob/c0ffee/one.py)"
    assert text.splitlines()[-1] == f"| {link} | equal, 1e-16, 2 calls |"


def test_entries_have_names_of_their_own() -> None:
    assert len(runner.examples()) > 50
