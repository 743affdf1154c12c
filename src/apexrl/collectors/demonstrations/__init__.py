"""Demonstrations: recorded, read, and handed to an algorithm."""
