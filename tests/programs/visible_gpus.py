"""Prints which GPUs this task may use, and leaves."""

import os

print(f"{os.environ['TFMW_TASK']} has GPUs {os.environ.get('CUDA_VISIBLE_DEVICES')}", flush=True)
