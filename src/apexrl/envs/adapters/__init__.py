"""Environments of other packages behind the ``VecEnv`` contract."""
