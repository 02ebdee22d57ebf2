"""NVIDIA GPUs, through PyTorch's CUDA. One process drives one GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F

# What is left to PyTorch's allocator beside the KV pool: activations of the largest chunk, graphs, sampling.
_LEFT_FREE = 0.1


class CudaPlatform:
    """One GPU. Products are PyTorch's own: the fused operations between them are `layers/triton_ops.py`'s."""

    name = "cuda"
    default_dtype = "bfloat16"
    page_size = 16
    min_rows = 1
    keeps_state = True

    def __init__(self, index: int = 0) -> None:
        """Raises `ValueError` where PyTorch sees no such GPU; the text says why and what to do."""
        if not torch.cuda.is_available():
            raise ValueError(f"--device cuda: {_why_not()}; use --device cpu here")
        if index >= torch.cuda.device_count():
            raise ValueError(
                f"--tp {index + 1} --device cuda: every rank needs a GPU of its own, and PyTorch sees "
                f"{torch.cuda.device_count()}; use --tp {torch.cuda.device_count()} or less"
            )
        self.device = torch.device("cuda", index)
        # float32 products stay float32: bfloat16 is there for those who want speed.
        torch.backends.cuda.matmul.allow_tf32 = False

    def pack(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> CudaLinear:
        """The weight as it is."""
        return CudaLinear(weight_OI, bias_O)

    def memory_available(self) -> int:
        """Bytes free on the GPU now, less a tenth of its memory."""
        free, total = torch.cuda.mem_get_info(self.device)
        return max(0, free - int(total * _LEFT_FREE))

    def set_threads(self, threads: int) -> None:
        """Use so many CPU threads for operators called from the current thread, and this GPU."""
        torch.set_num_threads(threads)
        torch.cuda.set_device(self.device)


class CudaLinear:
    """x_RI @ weight_OI.T + bias_O."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        self.weight_OI = weight_OI.contiguous()
        self.bias_O = bias_O

    def __call__(self, x_RI: torch.Tensor) -> torch.Tensor:
        return F.linear(x_RI, self.weight_OI, self.bias_O)


def has_gpu() -> bool:
    """Whether PyTorch sees a GPU of NVIDIA's. Builds for AMD call theirs `cuda` too: those are not tried yet."""
    return torch.version.hip is None and torch.cuda.is_available()


def _why_not() -> str:
    build = f"PyTorch {torch.__version__}"
    if torch.version.cuda is None:
        return f"{build} was built without CUDA: install a build with it (on a GPU machine `make serve` does)"
    return f"{build} sees no GPU: check that nvidia-smi shows one, and CUDA_VISIBLE_DEVICES"
