"""Ways to run steps."""

from __future__ import annotations

from tests.matrix.row import Case, row
from tests.matrix.rows.common import adam, classes, compiled, mlp


@row("steps_per_execution", core=True)
def steps_per_execution() -> Case:
    return Case(compiled(mlp(), adam(), steps_per_execution=3), classes())


@row("jit_compile", warns="jit_compile is off")
def jit_compile() -> Case:
    return Case(compiled(mlp(), adam(), jit_compile=True), classes(40))


@row("run_eagerly", core=True)
def run_eagerly() -> Case:
    return Case(compiled(mlp(), adam(), run_eagerly=True), classes(20))
