"""Kernels of draft heads."""
