"""`python -m tfmw` is `tfmw`."""

import sys

from tfmw.cli import main

sys.exit(main())
