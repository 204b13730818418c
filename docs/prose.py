"""Rules of prose: `python docs/prose.py` checks docstrings, comments and messages.

    tfmw/data/seek.py:12: 31 words in a sentence, at most 25: "..."

`make lint` runs it. It keeps the rules that a program can: sentences of at most 25 words, no noun
clause as a subject or a title, and the field's words in place of the house's. The first line of a
docstring is a noun phrase, or a verb with its object. Pages and notebooks have no limit, so that a
sentence can carry its reason; spelling and links are checked there.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORDS = 25
GAP = "\N{HORIZONTAL ELLIPSIS}"  # a value that a message is given

BANNED = {
    r"^(What|Who|Whose|Whoever|Whatever)\b[^?]*$": "begins with a noun clause: name the thing",
    r"^Where\b[^?]*\.$": "begins a condition: write If",
    r"\ban? N-th\b": "write 1/N",
    r"\b(whoever|whichever)\b": "name the person or the thing",
    r"\b(goes|go|went|going) on\b": "write continue",
    r"\btakes? part\b": "write joins",
    r"\bkin\b": "write relatives, or name them",
    r"\bstands? still\b": "write hangs",
    r"\bsimply|obviously|of course\b": "leave it out",
    r"\b(\w+) \1\b": "a word twice",
}
"""Pattern in a sentence -> remedy. Quoted messages and code are no sentences."""

_PREPOSITIONS = "As|At|Before|After|Beside|Besides|By|For|From|In|Of|On|Over|With|Within|Without"
_VERB = r"(is|are|was|were|be|been|has|have|had|do|does|can|may|must|will|would|\w+([^s]s|ed))\b"

NO_FIRST_WORD = re.compile(
    rf"({_PREPOSITIONS}|And|Are|But|Had|Has|Have|He|How|However|If|Is|It|Like|Neither|Nobody|None"
    r"|Nor|Not|Or|Says|She|So|Such|Tells|Than|That|Then|There|They|Though|Until|What|Whatever|When"
    r"|Where|Wherever|Which|Whichever|While|Who|Whoever|Whose|Why)\b(?![.:])"
)
"""A docstring that begins so has no noun phrase and no verb with its object in front."""

BANNED_IN_SOURCE = {
    r"^Of\b": "begins with Of: name the thing",
    r"^(what|who|whose|whatever) [^?]*$": "begins with a noun clause: name the thing",
    r"^None (where|while|without|of|outside|before|after|at|in|once|until)\b": "write None if",
    rf"^({_PREPOSITIONS})\b(?!.*\b{_VERB}).*\.$": "has no verb",
}
"""The same for docstrings and comments, which are checked by these rules, too."""


def source_files() -> list[Path]:
    """The Python files whose docstrings and comments are checked."""
    tops = ("bench", "recipes", "tests", "tfmw")
    return sorted(path for top in tops for path in (ROOT / top).rglob("*.py"))


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    """(line, docstring) of a file: of the module, its classes, functions and attributes."""
    for node in ast.walk(ast.parse(text)):
        for statement in node.body if isinstance(getattr(node, "body", None), list) else ():
            value = getattr(statement, "value", None) if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, inspect.cleandoc(value.value)


def comments(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each comment; lines below each other that have no code are one."""
    block: list[str] = []
    last = first = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line, alone = token.start[0], token.line.lstrip().startswith("#")
            if block and not (alone and line == last + 1):
                yield first, "\n".join(block)
                block = []
            first = first if block else line
            block.append(token.string.lstrip("# "))
            last = line if alone else 0
    if block:
        yield first, "\n".join(block)


SAYS = {"warn", "warning", "info", "error"}


def messages() -> Iterator[tuple[Path, int, str]]:
    """(file, line, text) of raised errors, warnings, log lines, and the help of options."""
    for path in sorted((ROOT / "tfmw").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            given: list[ast.expr] = []
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                given = node.exc.args
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in SAYS:
                given = node.args
            elif isinstance(node, ast.keyword) and node.arg == "help":
                given = [node.value]
            for value in given:
                parts = value.values if isinstance(value, ast.JoinedStr) else [value]
                texts = [str(p.value) if isinstance(p, ast.Constant) else GAP for p in parts]
                yield path, value.lineno, re.sub(r"%[\d.]*[sdrf]", GAP, "".join(texts))


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each paragraph, item, cell and heading; no code, no links' targets."""
    fenced = False
    block: list[str] = []
    start = 0
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if re.match(r"\s*(```|~~~)", line):
            fenced = not fenced
            line = ""
        if fenced or (line.startswith("    ") and not block):
            line = ""
        begins = re.match(r"\s*([-*] |\d+\. |\||#|\[\^)", line)
        if (not line.strip() or begins) and block:
            yield start, " ".join(block)
            block = []
        if not line.strip():
            continue
        if line.startswith("|"):
            for cell in line.strip("| ").split(" | "):
                yield number, cell
        else:
            start = start if block else number
            block.append(line.strip())


def plain(text: str) -> str:
    """Text with each piece of code as one word."""
    text = re.sub(r"!\[[^]]*\]\([^)]*\)", "", text)
    text = re.sub(r"`[^`]*`", "CODE", text)
    text = re.sub(r"\[\^\w+\]:?", "", text)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^(#+|[-*]|\d+\.) ", "", text)
    return re.sub(r"\*\*|\*(?=\w)|(?<=\w)\*", "", text)


def sentences(text: str) -> list[str]:
    """Sentences; an item after a colon or a semicolon counts by itself."""
    parts = re.split(r"(?<=[.!?:;])[\")]? +(?=\W*\w)|(?<=\.\))\s+", text)
    return [part.strip() for part in parts if part.strip()]


def faults(text: str, banned: dict[str, str] = BANNED) -> Iterator[tuple[int, str]]:
    """(line, fault) of each fault of a text in Markdown."""
    for line, paragraph in paragraphs(text):
        for sentence in sentences(plain(paragraph)):
            words = [w for w in sentence.split() if re.search(r"\w", w)]
            if len(words) > WORDS:
                yield line, f"{len(words)} words in a sentence, at most {WORDS}: {sentence!r}"
            for pattern, remedy in banned.items():
                if found := re.search(pattern, sentence):
                    yield line, f"{found[0]!r}: {remedy}"


def source_faults(text: str) -> Iterator[tuple[int, str]]:
    """(line, fault) of each fault of the docstrings and comments of a Python file."""
    documented, banned = list(docstrings(text)), BANNED | BANNED_IN_SOURCE
    for first, doc in documented:
        if NO_FIRST_WORD.match(doc):
            line = doc.partition("\n")[0]
            yield first, f"{line!r}: begin with a noun, or a verb and its object"
    for first, said in [*documented, *comments(text)]:
        for line, fault in faults(said, banned):
            yield first + line - 1, fault


def main() -> int:
    """Prints all faults; returns the exit status."""
    found = [(path, n, said) for path, n, text in messages() for _, said in faults(text)]
    for path in source_files():
        found += [(path, line, said) for line, said in source_faults(path.read_text())]
    for path, line, said in found:
        print(f"{path.relative_to(ROOT)}:{line}: {said}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
