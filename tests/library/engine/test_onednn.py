"""Size of oneDNN's kernel cache, read from its own log."""

import os
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this build of torch has no oneDNN"
)
_PROGRAM = """
import torch
from kaveri.engine.transformers.loading import load_runner
from kaveri.engine.transformers.cpu_layers import PackedLinear, PackedProduct

load_runner("kaveri-tiny", "float32", "cpu", None, 16)
with torch.inference_mode():
    layer = PackedLinear(PackedProduct.of([torch.nn.Linear(8, 8)]))
    for row_count in [1, *range(1, 200), 1]:
        print("rows", row_count, flush=True)
        layer(torch.zeros(row_count, 8))
"""


def test_the_code_for_numbers_of_rows_that_are_long_past_is_not_kept() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ONEDNN")}
    environment |= {"ONEDNN_VERBOSE": "profile_create", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], check=False, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    first, second, last = done.stdout.split("rows 1\n")[1:]
    assert "cache_miss" in first
    assert "cache_hit" in second.split("rows 2\n")[0]
    assert "cache_miss" in last
