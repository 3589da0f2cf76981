"""Declares the operators that torchvision's Python code describes and its CUDA-only library would have brought.

The install program adds this file's text to torchvision's `extension.py`, which runs before the descriptions are read.
Nothing calls the operators: SGLang imports torchvision for pictures, and the tests have none.
"""

import torch as _torch

for _name in ("nms", "qnms"):
    _torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
