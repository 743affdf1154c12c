"""The command line, ``apexrl COMMAND``: one module for the commands that belong together."""

from apexrl.cli.main import main

__all__ = ["main"]
