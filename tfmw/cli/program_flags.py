"""The division of a command line between tfmw and the script that it runs."""

from __future__ import annotations

import argparse
import io
import re
import tokenize
from collections.abc import Collection, Sequence
from pathlib import Path


def split(argv: list[str], parser: argparse.ArgumentParser) -> tuple[list[str], list[str]]:
    """Splits arguments: (options of tfmw with hyphens, the program and its flags).

    argparse alone would parse the program's flags as its own.
    """
    valued = {
        name
        for action in parser._actions
        if action.nargs != 0 and action.dest != "help"
        for name in action.option_strings
    }
    own: list[str] = []
    rest = list(argv)
    while rest:
        if rest[0] == "--":
            return own, rest[1:]
        if not rest[0].startswith("-"):
            break
        token = rest.pop(0)
        if token == "-m":
            return [*own, "-m", *rest[:1]], rest
        name, equals, value = token.partition("=")
        name = with_hyphens(name)
        own.append(name + equals + value)
        if name in valued and not equals:
            own += rest[:1]
            del rest[:1]
    return own, rest


def passed_by_mistake(program: Sequence[str], own: Collection[str]) -> list[str]:
    """Names of options of `tfmw run` among a script's flags that the script does not read.

    Args:
        program: the path of the script, and its flags.
        own: names of the options of `tfmw run`.
    """
    found = [with_hyphens(flag).partition("=")[0] for flag in program[1:]]
    try:
        text = Path(program[0]).read_text()
        tokens = [token.string for token in tokenize.generate_tokens(io.StringIO(text).readline)]
    except (OSError, IndexError, SyntaxError, UnicodeError, tokenize.TokenError):
        return []  # a module, a folder, or no Python
    # A name, a whole string, or, also in a comment, the flag itself: a comment on workers is none.
    known = {token.strip("'\"").lstrip("-") for token in tokens}
    known |= {flag.lstrip("-") for flag in re.findall(r"--[\w-]+", text)}
    known = {name.replace("_", "-") for name in known}
    return [name for name in found if name in own and name[2:] not in known]


def with_hyphens(token: str) -> str:
    """--log_dir=a_b -> --log-dir=a_b."""
    name, equals, value = token.partition("=")
    return (name.replace("_", "-") if name.startswith("--") else name) + equals + value
