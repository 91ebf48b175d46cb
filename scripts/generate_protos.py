"""Generates kaveri/v1/*_pb2.py, *_pb2_grpc.py and their .pyi from protos/kaveri/v1/*.proto.

Usage: python scripts/generate_protos.py [TARGET_FOLDER]. The target folder is the repository's root unless named;
a test names a temporary one and compares.
"""

import shutil
import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent


def generate(target: Path) -> None:
    """Writes the generated modules below `target`/kaveri/v1. Raises RuntimeError when protoc refuses a file."""
    sources = sorted((ROOT / "protos").glob("kaveri/v1/*.proto"))
    well_known = Path(protoc.__file__).parent / "_proto"
    # protoc looks its plug-ins up on PATH; ours live beside the interpreter that runs us.
    plugin_folder = Path(sys.executable).parent
    plugins = [f"--plugin={name}={plugin_folder / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
    outputs = [f"--{kind}_out={target}" for kind in ("python", "grpc_python")]
    typings = [f"--mypy_out=quiet:{target}", f"--mypy_grpc_out=quiet:{target}"]
    arguments = ["protoc", f"-I{ROOT / 'protos'}", f"-I{well_known}", *plugins, *outputs, *typings]
    status = protoc.main([*arguments, *(str(source) for source in sources)])
    if status != 0:
        raise RuntimeError(f"protoc ended with status {status}")
    package = target / "kaveri" / "v1"
    (package / "__init__.py").write_text('"""Generated from protos/kaveri/v1 by scripts/generate_protos.py."""\n')
    # Services alone have something to say in *_pb2_grpc; the empty ones would only be noise.
    for module in package.glob("*_pb2_grpc.py"):
        if "_registered_method" not in module.read_text():
            module.unlink()
            module.with_suffix(".pyi").unlink(missing_ok=True)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    shutil.rmtree(folder / "kaveri" / "v1", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    generate(folder)
