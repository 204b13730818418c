"""Pickles of Keras models for child processes of this one.

    packed = Packer().dump((model, settings))
    model, settings = call.loads(packed)             # in a child process
    rebuilt(model)

Keras's own archive needs a `get_config` and registered classes, which models of a notebook often
lack. Here layers, losses, metrics and optimizers are pickled attribute by attribute, and variables
as arrays. Classes and functions that no module contains are pickled too (cloudpickle). The bytes
are passed in memory to children of this process: they are never read from a disk or a network.
"""

from __future__ import annotations

import importlib
import inspect
import io
import pickle
import struct
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmw.compat import layer_graphs, objects, optimizers
from tfmw.errors import UsageError, first_line
from tfmw.launcher import call

# Errors of objects that cannot be pickled; OpError: for example a layer's lookup table.
_REFUSALS = (TypeError, ValueError, AttributeError, NotImplementedError, tf.errors.OpError)


class Packer:
    """Pickles a model without the values of its variables, and then data that refers to its parts.

        packer = Packer(take)
        structure = packer.dump(model, apart=True)     # equal as long as only values change
        data = packer.dump((packer.variables, callbacks))
        unpacker = Unpacker(structure, arrays, dict(enumerate(packer.values)))
        model = unpacker.load()
        Unpacker(data, arrays, parts=unpacker.parts).load()

    Args:
        take: a pickler's `buffer_callback`.

    Attributes:
        variables: the Keras variables of the model.
        values: their values.
    """

    def __init__(self, take: Callable[[pickle.PickleBuffer], bool] | None = None):
        cloudpickle = call.pickler()
        if cloudpickle is pickle:
            raise UsageError(
                "sending a model to other processes needs cloudpickle, which is not installed: "
                "pip install cloudpickle."
            )
        self.variables: list[Any] = []
        self.values: list[np.ndarray] = []
        numbers: dict[int, int] = {}  # id of a value -> its place among the values
        in_graphs: dict[int, Any] = {}  # id -> operation, of the graphs that are in the pickle
        packer, self._apart = self, False

        class Pickler(cloudpickle.Pickler):  # type: ignore[name-defined]
            def reducer_override(self, part: Any) -> Any:
                if isinstance(part, keras.Operation) and id(part) not in in_graphs:
                    graph = layer_graphs.flat_graph(part)
                    in_graphs.update((id(each), each) for each in graph[0])
                    # The first argument contains this operation: pickle then refers to that one,
                    # as it does in a tuple that contains itself.
                    return layer_graphs.connect, graph
                reduced = _reduced(part)
                if packer._apart and isinstance(part, keras.Variable):
                    numbers[id(reduced[1][-1])] = len(packer.values)
                    packer.variables.append(part)
                    packer.values.append(reduced[1][-1])
                return super().reducer_override(part) if reduced is None else reduced

            def persistent_id(self, part: Any) -> int | None:
                return numbers.get(id(part))

        self._buffer = io.BytesIO()
        self._pickler = Pickler(self._buffer, 5, take)

    def dump(self, value: Any, apart: bool = False) -> bytes:
        """Pickles a value, whose parts in earlier values become references.

        Args:
            apart: whether the values of Keras variables are left out.

        Raises:
            UsageError: an object in it cannot be pickled.
        """
        start, self._apart = self._buffer.tell(), apart
        try:
            self._pickler.dump(value)
        except (*_REFUSALS, pickle.PickleError) as e:
            reason = first_line(e)
            raise UsageError(
                f"something in the arguments cannot be sent to other processes ({reason}): pass "
                "callables that make the model and the dataset in each process."
            ) from e
        return self._buffer.getvalue()[start:]


class Unpacker(pickle.Unpickler):
    """Unpickles what a `Packer` of the caller has pickled.

    Args:
        data: a result of `Packer.dump`.
        arrays: those that its `take` has kept apart.
        values: values of variables by their number.
        parts: the `parts` of the unpacker of the value before, to which this one may refer.
    """

    def __init__(
        self,
        data: bytes,
        arrays: Iterable[Any],
        values: Mapping[int, Any] | None = None,
        parts: Sequence[Any] = (),
    ):
        # A pickle refers to parts of the value before by their place in the memo of both.
        places = (pickle.BININT + struct.pack("<i", place) for place in range(len(parts)))
        again = pickle.BINPERSID + pickle.MEMOIZE + pickle.POP
        before = b"".join(place + again for place in places)
        super().__init__(io.BytesIO(before + data), buffers=arrays)
        self._values: Any = parts if values is None else values

    def persistent_load(self, number: int) -> Any:
        return self._values[number]

    @property
    def parts(self) -> list[Any]:
        """The objects of an unpickled value, without the values of variables."""
        values = set(map(id, self._values.values()))
        return [
            None if type(part) is tuple and part and id(part[-1]) in values else part
            for _, part in sorted(self.memo.copy().items())
        ]


def rebuilt(model: keras.Model) -> keras.Model:
    """An unpacked model, with the maps of variables and nodes that Keras makes from addresses."""
    for optimizer in optimizers.optimizers_of(model):
        optimizers.rebuild_variable_maps(optimizer)
    layer_graphs.rename_nodes(model)
    return model


def _reduced(part: Any) -> Any:
    """The `__reduce__` value of an object that pickle does not support; None for others."""
    if isinstance(part, types.FunctionType):
        return _reduced_function(part)
    if isinstance(part, weakref.ReferenceType):
        return weakref.ref, (part(),)
    if isinstance(part, _LOCKS):
        return threading.RLock, ()
    return objects.reduced(part)


def _reduced_function(function: types.FunctionType) -> Any:
    """Refers to a function that is defined within another one of Keras by its place there.

    Each layer has seven of them. cloudpickle would write their code, and search all imported
    modules for what it needs: two seconds for a ResNet50.
    """
    # A function that exec has made may have no module.
    module, code = str(function.__globals__.get("__name__")), function.__code__
    if not module.startswith("keras."):
        return None
    outer, within, _ = code.co_qualname.partition(".<locals>")
    place = _place_of(code, getattr(_found(module, outer), "__code__", None)) if within else ()
    if not place:
        return None
    attributes = ("__name__", "__qualname__", "__module__", "__doc__", "__dict__")
    defaults = ("__defaults__", "__kwdefaults__", "__annotations__")
    state = {name: getattr(function, name) for name in (*attributes, *defaults)}
    made = _function, (module, outer, place, function.__closure__)
    return *made, state, None, None, _set_attributes


def _found(module: str, qualname: str) -> Any:
    """A member of a module, unwrapped; None if the name has another meaning now."""
    found: Any = importlib.import_module(module)
    for name in qualname.split("."):
        found = getattr(found, name, None)
    return inspect.unwrap(found) if callable(found) else None


def _place_of(code: types.CodeType, outer: types.CodeType | None) -> tuple[int, ...]:
    """The indices of a function's code among the constants of the functions around it."""
    for n, constant in enumerate(outer.co_consts if outer else ()):
        if constant is code:
            return (n,)
        if isinstance(constant, types.CodeType) and (place := _place_of(code, constant)):
            return n, *place
    return ()


def _function(module: str, outer: str, place: tuple[int, ...], closure: Any) -> Any:
    code = _found(module, outer).__code__
    for n in place:
        code = code.co_consts[n]
    return types.FunctionType(code, vars(sys.modules[module]), closure=closure)


def _set_attributes(part: Any, attributes: Mapping[str, Any]) -> None:
    for name, value in attributes.items():
        setattr(part, name, value)


_LOCKS = (type(threading.Lock()), type(threading.RLock()))
