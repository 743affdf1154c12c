"""Environments in processes of their own, which start without PyTorch: nothing here may import it."""
