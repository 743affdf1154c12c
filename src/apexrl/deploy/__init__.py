"""Policies outside of training."""
