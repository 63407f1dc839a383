"""`python -m kit` runs `kit`."""

import sys

from kit.cli import main

sys.exit(main())
