"""The vocabulary: types, errors, observations, metrics; below it the mathematics and the machine."""
