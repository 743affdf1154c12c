"""The command line, ``apexrl COMMAND``: one module for the commands that belong together."""

import sys

if sys.argv[0] == "-m" and not sys.flags.safe_path:  # python -m: nothing is imported from the current directory
    del sys.path[0]

from apexrl.cli.main import main

__all__ = ["main"]
