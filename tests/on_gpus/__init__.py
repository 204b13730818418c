"""Training on two GPU replicas beside one: `python -m tests.on_gpus`, on one GPU or more."""
