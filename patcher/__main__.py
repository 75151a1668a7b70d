"""`python -m patcher` is `ddtree-patch`."""

import sys

from patcher.cli import main

sys.exit(main())
