"""The commands of the command line, a module for those that belong together."""

from apexrl.commands import evaluate, files, tools, train

MODULES = (train, evaluate, files, tools)
"""In the order in which ``apexrl --help`` shows their commands."""

__all__ = ["MODULES"]
