"""Training on GPUs beside Keras: `make test-gpu`, on a machine with one GPU or more."""
