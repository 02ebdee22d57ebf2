"""CPUs, through PyTorch and oneDNN."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F

# oneDNN's plan for packed weights depends on the rows it is told to expect. Packed for 1, steps of four rows and more
# take about 1.4 times as long as packed for 8 (docs/decisions/0102).
_PACK_ROWS = 8


class CpuPlatform:
    """A CPU. One and two rows cost more than four there, so steps are padded to four."""

    name = "cpu"
    default_dtype = "float32"
    page_size = 16
    min_rows = 4
    keeps_state = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def pack(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> _CpuLinear:
        """Reorder a weight [out, in] into oneDNN's blocked form, where this build of PyTorch has it."""
        return _CpuLinear(weight_OI, bias_O)

    def memory_available(self) -> int:
        """Half of the memory that the operating system calls available, in bytes."""
        try:
            with open("/proc/meminfo") as lines:
                for line in lines:
                    if line.startswith("MemAvailable:"):
                        return int(line.split()[1]) * 1024 // 2
        except OSError:
            pass
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4

    def set_threads(self, threads: int) -> None:
        """Use so many threads for operators called from the current thread."""
        torch.set_num_threads(threads)


class _CpuLinear:
    """x_RI @ weight_OI.T + bias_O."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        self._bias_O = bias_O
        self._packed: torch.Tensor | None = None
        self._weight_OI: torch.Tensor | None = None
        if _onednn_packs(weight_OI.dtype):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), _PACK_ROWS)
            self._multiply = torch.ops.mkldnn._linear_pointwise.default
        else:
            self._weight_OI = weight_OI.contiguous()

    def __call__(self, x_RI: torch.Tensor) -> torch.Tensor:
        if self._packed is not None:
            product_RO: torch.Tensor = self._multiply(x_RI, self._packed, self._bias_O, "none", [], "")
            return product_RO
        assert self._weight_OI is not None
        return F.linear(x_RI, self._weight_OI, self._bias_O)


def _onednn_packs(dtype: torch.dtype) -> bool:
    """Whether packed weights of this type work here; the operators exist in all supported PyTorch builds for x86."""
    if not torch._C._has_mkldnn or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
