"""``python -m fmsupervisor``."""

import sys

from fmsupervisor.cli import main

sys.exit(main())
