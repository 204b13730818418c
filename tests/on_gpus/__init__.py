"""Training on two GPU replicas beside one: `make test-gpu`, on a machine with one GPU or more."""
