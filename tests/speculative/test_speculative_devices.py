"""A draft's head lies on the model's device.

A GPU that is not here is stood in for by PyTorch's fake tensors, which have a device and no data, and mind operations
across devices.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowlat.engine.drafts import _whole_head
from lowlat.parallel.group import SingleRank

GPU = torch.device("cuda:0")


def test_fake_tensors_mind_devices():
    with FakeTensorMode(), pytest.raises(RuntimeError):
        torch.zeros(3, 4, device=GPU).index_select(0, torch.arange(2))


def test_the_head_of_a_smaller_vocabulary_is_on_the_models_device():
    with FakeTensorMode():
        build: Any = SimpleNamespace(communicator=SingleRank(), dtype=torch.float32)
        model: Any = SimpleNamespace(
            embedding_VH=torch.zeros(99, 64, device=GPU), config=SimpleNamespace(tie_word_embeddings=True)
        )
        head_VH = _whole_head(SimpleNamespace(), model, build, torch.arange(60))  # type: ignore[arg-type]
        assert head_VH is not None
        assert (head_VH.shape, head_VH.device) == ((60, 64), GPU)
