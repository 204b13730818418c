"""The message of an error in the last line that `tfmw run` prints."""

from __future__ import annotations

import pytest

from tfmw.launcher.failure import MAX_LENGTH, informative_part

GRAPH = """Graph execution error:

Detected at node sequential_1/embedding_1/GatherV2 defined at (most recent call last):
  File "train.py", line 28, in <module>

  File "keras/src/backend/tensorflow/trainer.py", line 399, in fit

indices[0,1] = 9 is not in [0, 3)
\t [[{{node sequential_1/embedding_1/GatherV2}}]] [Op:__inference_multi_step_on_iterator_546]"""

LAYER = """Exception encountered when calling Dense.call().

\x1b[1m{{function_node __wrapped____MklMatMul_device_/job:localhost/device:CPU:0}} \
Matrix size-incompatible: In[0]: [2,3], In[1]: [7,2] [Op:MatMul] name: \x1b[0m

Arguments received by Dense.call():
  • x=tf.Tensor(shape=(2, 3), dtype=float32)"""

MAP = """{{function_node __wrapped__IteratorGetNext}} Error in user-defined function \
passed to MapDataset:26 transformation: ZeroDivisionError: division by zero
Traceback (most recent call last):

  File "script_ops.py", line 267, in __call__
    return func(device, token, args)
           ^^^^^^^^^^^^^^^^^^^^^^^^^

ZeroDivisionError: division by zero


\t [[{{node EagerPyFunc}}]] [Op:IteratorGetNext] name: """


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (GRAPH, "indices[0,1] = 9 is not in [0, 3)"),
        (LAYER, "Matrix size-incompatible: In[0]: [2,3], In[1]: [7,2]"),
        (
            MAP,
            "Error in user-defined function passed to MapDataset:26 transformation: "
            "ZeroDivisionError: division by zero ZeroDivisionError: division by zero",
        ),
        ("\n\n  no such file: a.txt\n\ncheck --data_dir", "no such file: a.txt check --data_dir"),
        ("Graph execution error:", "Graph execution error:"),
        ("one line", "one line"),
        ("", "(no message)"),
    ],
)
def test_the_informative_part(message, shown):
    assert informative_part(message) == shown


def test_message_is_cut_at_its_maximum_length():
    assert informative_part("x" * MAX_LENGTH) == "x" * MAX_LENGTH
    assert informative_part("x" * 5000) == "x" * (MAX_LENGTH - 3) + "..."
