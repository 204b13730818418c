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


SOURCE = '''"""{module}"""


class Ring:
    """{cls}"""

    size: int
    """{attribute}"""

    def send(self):
        """{method}"""
        # {comment}
        return self.size  # {trailing}
'''
PLAIN = {
    "module": "Sums of arrays over all workers.",
    "cls": "A ring; None if there is one worker.",
    "attribute": "World size.",
    "method": "Sends a chunk.\n\n        In a replica context the sum is read at once.",
    "comment": "The peer reads this first.",
    "trailing": "of all machines",
}


@pytest.mark.parametrize(
    ("where", "written", "line", "said"),
    [
        ("module", "Of a ring, the sums.", 1, "begin with a noun"),
        ("cls", "As in PyTorch.", 5, "begin with a noun"),
        ("attribute", "What a ring sends.", 8, "begin with a noun"),
        ("method", "How a chunk is sent.", 11, "begin with a noun"),
        ("method", "Sends.\n\n        Of many chunks, the last.", 13, "begins with Of"),
        ("method", "Sends a chunk: what the peer lacks.", 11, "begins with a noun clause"),
        ("method", "Sends a chunk. In a replica context.", 11, "has no verb"),
        ("method", "Sends a chunk. None where it is alone.", 11, "write None if"),
        ("comment", "What the peer lacks\n        # is sent.", 14, "begins with a noun clause"),
        ("comment", "It is sent, then\n        # the run goes on.", 14, "write continue"),
        ("trailing", "Of all machines", 15, "begins with Of"),
    ],
)
def test_a_fault_of_a_docstring_or_comment_is_found_on_its_line(where, written, line, said):
    found = list(PROSE["source_faults"](SOURCE.format(**PLAIN | {where: written})))
    assert (line, said) in [(at, said) for at, fault in found if said in fault], found


def test_plain_docstrings_and_comments():
    assert list(PROSE["source_faults"](SOURCE.format(**PLAIN))) == []


def test_all_docstrings_comments_and_messages_are_read():
    """`make lint` reads them."""
    assert len(list(PROSE["messages"]())) > 300
    assert len(PROSE["source_files"]()) > 500
