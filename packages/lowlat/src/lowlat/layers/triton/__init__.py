"""Triton kernels of the general path on GPUs, one family a file, each with its typed wrapper.

Importing a module here imports triton, which not every build of PyTorch brings: only `layers/triton_ops.py` does, when
a device wants it. Each wrapper has a plain PyTorch reference in `layers/device_reference.py`, and tests compare them.
They run on an H200 (tests/gpu), under Triton's interpreter in float32, and are compiled for sm_90, sm_100 and gfx950 in
ordinary tests.
"""
