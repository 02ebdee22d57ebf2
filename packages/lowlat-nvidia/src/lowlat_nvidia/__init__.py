"""Low-latency decode kernels for NVIDIA Hopper GPUs. Importing this touches no device and needs no CUDA package."""

__version__ = "0.1.0"
