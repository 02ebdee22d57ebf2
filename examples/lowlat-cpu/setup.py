"""Builds the step once for each instruction set; which one runs is decided on the user's machine."""

import platform
from glob import glob

from setuptools import Extension, setup

COMMON = ["-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=fast", "-fvisibility=hidden", "-fopenmp"]
QUIET = ["-Wno-psabi", "-Wno-maybe-uninitialized", "-Wno-unknown-warning-option"]
VARIANTS = {"portable": []}
if platform.machine() in ("x86_64", "AMD64"):
    VARIANTS["avx2"] = ["-mavx2", "-mfma"]
    VARIANTS["avx512"] = ["-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq", "-mfma", "-mprefer-vector-width=512"]
    VARIANTS["avx512vnni"] = [*VARIANTS["avx512"], "-mavx512vnni"]

setup(
    ext_modules=[
        Extension(
            f"lowlat_cpu._step_{name}",
            sources=[f"csrc/step_{name}.cpp"],
            depends=["csrc/step.cpp", *sorted(glob("csrc/*.h"))],
            language="c++",
            extra_compile_args=[*COMMON, *QUIET, *flags],
            extra_link_args=["-fopenmp"],
            # Without AVX the portable code is all there is; without a portable build there is no library.
            optional=name != "portable",
        )
        for name, flags in VARIANTS.items()
    ]
)
