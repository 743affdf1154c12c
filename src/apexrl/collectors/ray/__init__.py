"""Collection in Ray's workers."""
