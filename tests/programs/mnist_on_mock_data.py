"""recipes/mnist.py, unchanged, on TFDS's own stand-in for MNIST; the arguments are its flags."""

import runpy
import sys
from pathlib import Path

import tensorflow_datasets as tfds

import tfmw

recipes = Path(__file__).resolve().parents[2] / "recipes"
sys.path.insert(0, str(recipes))
tfmw.init()
with tfds.testing.mock_data(num_examples=100):
    runpy.run_path(str(recipes / "mnist.py"), run_name="__main__")
