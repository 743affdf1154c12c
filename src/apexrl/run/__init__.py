"""One run: its configuration, how it is built, and its directory."""
