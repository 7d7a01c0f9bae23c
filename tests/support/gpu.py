"""What tests for GPUs share. Such a file names `pytest.mark.gpu` itself: benchmarks/gpu_steps.py looks for it."""

import pytest
import torch

from gossamer import _C

needs_gpu = pytest.mark.skipif(
    not (torch.cuda.is_available() and _C.with_cuda),
    reason="needs a GPU and a build of gossamer with CUDA",
)
