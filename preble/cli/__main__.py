"""`python -m preble.cli` is the `preble` command."""

import sys

from .main import main

sys.exit(main())
