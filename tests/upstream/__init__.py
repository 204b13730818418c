"""Tests of the hook that tfmw proposes to Keras: `make test-nightly` runs them."""
