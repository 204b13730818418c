"""Engines and jobs as the shell names them: `--on slurm --set partition=gpu`, `slurm:4711`."""

from __future__ import annotations

import argparse
import ast
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfmw.errors import UsageError

if TYPE_CHECKING:  # `tfmw run --help` must not wait for their import
    from tfmw.engines.engine import Engine
    from tfmw.engines.job import Job


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Adds `--set` to a command."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="NAME=VALUE",
        help="a setting of the engine, such as partition=gpu; may be repeated",
    )


def engine_with(name: str, settings: Sequence[str]) -> Engine:
    """The engine of a name, with settings as "partition=gpu".

    Raises:
        UsageError: an unknown engine or setting.
    """
    from tfmw.engines import submit

    engine = submit.engine_of(name)
    known = {field.name for field in dataclasses.fields(engine)}
    values = {}
    for setting in settings:
        field, equals, text = setting.partition("=")
        if not equals or field not in known:
            raise UsageError(
                f"received --set {setting}: expected NAME=VALUE with a setting of {name}: "
                f"{', '.join(sorted(known))}."
            )
        try:
            values[field] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            values[field] = text
    return dataclasses.replace(engine, **values)


def attached(job_id: str, settings: Sequence[str]) -> Job:
    """The job of an id, on an engine with settings.

    Raises:
        UsageError: there is no such job, engine or setting.
    """
    from tfmw.engines import submit

    name = job_id.partition(":")[0]
    return submit.attach(job_id, on=engine_with(name, settings) if settings else None)
