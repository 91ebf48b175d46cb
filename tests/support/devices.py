"""Devices for tests of the transformers engine: the CPU, and a GPU if there is one."""

import torch

DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
