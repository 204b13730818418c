"""The rules of prose, on pages that break them and on all pages."""

from __future__ import annotations

import runpy

import pytest

from tests.helpers.cluster import ROOT

PROSE = runpy.run_path(str(ROOT / "docs" / "prose.py"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("What a job leaves is unpickled.", "'What a job leaves is unpickled.'"),
        ("Fine. Whoever starts it waits.", "'Whoever starts it waits.'"),
        ("Where a host dies, all restart.", "write If"),
        ("Each has an N-th of it.", "write 1/N"),
        ("| a | the run goes on |", "write continue"),
        ("It is the the end.", "a word twice"),
        (" ".join(f"w{n}" for n in range(26)) + ".", "26 words"),
        ("- an item\n  " + " ".join(f"w{n}" for n in range(26)), "28 words"),
    ],
)
def test_a_fault_is_found(text, said):
    assert [found for _, found in PROSE["faults"](text) if said in found], text


@pytest.mark.parametrize(
    "text",
    [
        "What is a worker?",
        "`what goes on` is code, and so is\n\n```\nwhat goes on\n```\n",
        " ".join(f"w{n}" for n in range(25)) + ".",
        "| " + " | ".join(f"w{n}" for n in range(30)) + " |",
    ],
)
def test_no_fault(text):
    assert list(PROSE["faults"](text)) == []


def test_all_pages_public_docstrings_and_messages():
    assert len(PROSE["pages"]()) > 50
    assert len(list(PROSE["docstrings"]())) > 30
    assert len(list(PROSE["messages"]())) > 300
    assert PROSE["main"]() == 0
