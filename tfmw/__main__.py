"""`python -m tfmw` is `tfmw`."""

import sys

from tfmw.cli.main import main

sys.exit(main())
