"""Comparison of a model with a backup, and with the models of other tasks.

    lines = signature(model, batch_size)
    refuse_other(record, lines, "/shared/backups/run7")     # UsageError with the first difference
    settings(model)                      # {"layer 3: Dropout, rate": 0.1, ...}, for other tasks

Releases of Keras describe the same model in different ways: with new settings, other names of an
optimizer's variables (`SGD/`, `sgd/`), or 0.01 rounded to float32. If a backup was written with
another Keras, the comparison ignores these differences.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import keras

from tfmw.compat import models, optimizers
from tfmw.compat.metric_variables import leaf_metrics
from tfmw.errors import UsageError
from tfmw.train.checkpoint.state import named, plain

# Lines of `signature`, such as "layer 3: Dense, units: 4" and "variable sgd/dense_kernel: float32
# (3, 4)".
_SETTING = re.compile(r"((?:layer \d+|optimizer|object|metric .*): \w+, \w+): (.*)", re.DOTALL)
_VARIABLE = re.compile(r"variable (?:.*/)?([^/]*): (\w+ \(.*\))", re.DOTALL)


def signature(model: keras.Model, batch_size: int | None) -> list[str]:
    """One line for each property in which a model and its backup must agree."""
    lines = _parts(model)
    for variable in named(model).values():
        native = models.native(variable)
        lines.append(f"variable {plain(variable.path)}: {native.dtype.name} {native.shape}")
    lines.append(f"loss: {_loss(getattr(model, 'loss', None))}")
    for metric in leaf_metrics(model):
        shapes = [tuple(v.shape) for v in metric.variables]
        lines.append(f"metric {plain(metric.name)}: {type(metric).__name__} {shapes}")
    lines.append(f"global batch size: {batch_size}")
    return lines


def _parts(model: keras.Model) -> list[str]:
    """The lines of the layers and the optimizers."""
    lines = [f"model: {type(model).__name__}"]
    for number, layer in enumerate(models.layers_of(model)):
        if layer is not model:
            lines += _described(f"layer {number}", layer)
    for optimizer in optimizers.optimizers_of(model):
        lines += _described("optimizer", optimizer)
    return lines


def _described(what: str, part: Any) -> list[str]:
    """One line for the class of a layer, optimizer or loss, and one for each setting."""
    kind, config = f"{what}: {type(part).__name__}", _config(part)
    # These differ between runs of the same model, or have their own lines.
    for name in ("name", "learning_rate", "layers", "build_config", "inner_optimizer"):
        config.pop(name, None)
    return [kind, *(f"{kind}, {name}: {_json(config[name])}" for name in sorted(config))]


def _config(part: Any) -> dict[str, Any]:
    """The configuration of a Keras object; {} if it has none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of lambdas, which a saved model could not load
            return dict(part.get_config())
    except (NotImplementedError, TypeError, ValueError, AttributeError):
        return {}


def _json(value: Any) -> str:
    """A configuration; of what is not JSON, such as arrays, the name of the type."""
    part = _without_numbers(value)
    return json.dumps(part, sort_keys=True, default=lambda part: type(part).__name__)


def _without_numbers(value: Any) -> Any:
    """A configuration without the numbers that Keras appends to generated names."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, Mapping):
        return {str(k): _without_numbers(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_without_numbers(v) for v in value]
    return value


def _loss(loss: Any) -> str:
    """Name of the loss argument of compile()."""
    if isinstance(loss, Mapping):
        return ", ".join(f"{key}: {_loss(loss[key])}" for key in sorted(loss, key=str))
    if isinstance(loss, list | tuple):
        return f"[{', '.join(map(_loss, loss))}]"
    if isinstance(loss, keras.losses.Loss):
        return "; ".join(_described("object", loss))
    return str(getattr(loss, "__name__", loss if isinstance(loss, str) else type(loss).__name__))


def settings(model: keras.Model) -> dict[str, Any]:
    """Name -> JSON value of each setting in which the models of all tasks must agree.

    All tasks take the learning rate, seeds and initial values from the chief. Paths of files and
    code depend on the host.
    """
    lines = [*_parts(model), f"loss: {_loss(getattr(model, 'loss', None))}"]
    for metric in leaf_metrics(model):
        lines += _described(f"metric {plain(metric.name)}", metric)
    rates = [_config(o).get("learning_rate") for o in optimizers.optimizers_of(model)]
    others = {
        **models.loss_arguments(model),
        "learning_rate": [rate for rate in rates if isinstance(rate, dict)],
        "jit_compile": model.jit_compile,
        "run_eagerly": model.run_eagerly,
    }
    found = {name: json.loads(_json(value)) for name, value in others.items()}
    known: Counter[str] = Counter()
    for line in _split(lines):
        match = _SETTING.fullmatch(line)
        name, value = (match[1], json.loads(match[2])) if match else line.split(": ", 1)
        known[name] += 1
        found[f"{name} ({known[name]})" if known[name] > 1 else name] = value
    return {name: _of_all(value) for name, value in found.items() if not _is_taken(name)}


def _of_all(value: Any) -> Any:
    """A setting without what may differ between tasks."""
    if isinstance(value, dict):
        return {name: _of_all(part) for name, part in value.items() if not _is_taken(name)}
    if isinstance(value, list):
        return list(map(_of_all, value))
    return "a path, or code" if isinstance(value, str) and {*"/\\\n"} & {*value} else value


def _is_taken(name: str) -> bool:
    """Whether all tasks take a setting, or what depends on it, from the chief."""
    return name.endswith(("initializer", "seed"))


def refuse_other(record: Mapping[str, Any], current: list[str], path: str) -> None:
    """Raises UsageError naming the first difference between a backup and a model.

    Args:
        record: record of the backup: `signature`, and `versions` of packages if a recent tfmw wrote
            it.
        current: the model's signature.
        path: path of the backups, for the message.
    """
    saved, versions = record["signature"], ""
    then_keras, now_keras = record.get("versions", {}).get("keras"), keras.__version__
    if then_keras != now_keras:
        saved, current = _of_both(saved, current), _of_both(current, saved)
    if then_keras not in (now_keras, None):
        versions = f" (written with Keras {then_keras}; this is {now_keras})"
    for was, now in itertools.zip_longest(saved, current):
        if was == now or (then_keras != now_keras and _is_same(_parsed(was), _parsed(now))):
            continue
        kind, has = "model", f"it has [{was}], this run has [{now}]"
        if was is None or now is None:
            has = f"only {'this run' if was is None else 'the backup'} has [{was or now}]"
        elif was.startswith("global batch size"):
            kind = "batch size"
        raise UsageError(
            f"the backup in {path!r} belongs to another {kind}: {has}{versions}. Use another "
            "backup_dir, or delete that one to start anew."
        )


def _of_both(lines: Iterable[str], others: Iterable[str]) -> list[str]:
    """Lines without settings that the other signature lacks."""
    known = {match[1] for line in _split(others) if (match := _SETTING.fullmatch(line))}
    found = ((line, _SETTING.fullmatch(line)) for line in _split(lines))
    return [line for line, match in found if match is None or match[1] in known]


def _split(lines: Iterable[str]) -> list[str]:
    """Lines of a signature, with one for each setting of a loss."""
    loss = "loss: object: "
    return [
        part
        for line in lines
        for part in (line[6:].split("; ") if line.startswith(loss) else [line])
    ]


def _parsed(line: str | None) -> Any:
    """A value in a form that does not change with the release of Keras."""
    if match := _SETTING.fullmatch(line or ""):
        with contextlib.suppress(ValueError):
            return [match[1], json.loads(match[2])]
    if match := _VARIABLE.fullmatch(line or ""):
        return list(match.groups())
    return line


def _is_same(was: Any, now: Any) -> bool:
    """Whether two JSON values agree in all parts that both have."""
    if isinstance(was, dict) and isinstance(now, dict):
        return all(_is_same(was[name], now[name]) for name in was.keys() & now.keys())
    if isinstance(was, list) and isinstance(now, list):
        return len(was) == len(now) and all(map(_is_same, was, now))
    if isinstance(was, float) and isinstance(now, float):
        return math.isclose(was, now, rel_tol=1e-6)
    return bool(was == now)
