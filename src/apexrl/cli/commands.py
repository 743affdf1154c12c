"""The commands of the command line, a module for those that belong together."""

from apexrl.cli import compare, evaluate, files, report, sweep, tools, train

MODULES = (train, sweep, evaluate, compare, files, report, tools)
"""In the order in which ``apexrl --help`` shows their commands."""

__all__ = ["MODULES"]
