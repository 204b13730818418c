"""Selection of the tests that only `make nightly` runs."""

import os

collect_ignore = [] if os.environ.get("TFMW_TEST_HOSTS") == "all" else ["test_slurm.py"]
