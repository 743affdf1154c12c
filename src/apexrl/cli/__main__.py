"""``python -m apexrl.cli``, as ``torchrun`` starts it."""

import sys

from apexrl.cli.main import main

sys.exit(main())
