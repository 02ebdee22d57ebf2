"""Kernels of DeepSeek-V4.1."""
