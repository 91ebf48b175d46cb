"""The devices on which tests of the transformers engine run: the CPU, and a GPU where there is one."""

import torch

DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
