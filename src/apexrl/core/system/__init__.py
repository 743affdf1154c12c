"""The machine: acceleration, processes, files, random streams."""
