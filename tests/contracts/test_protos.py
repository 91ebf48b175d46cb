"""The generated code of the protos is up to date, and every name in them has a comment."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

ROOT = Path(__file__).resolve().parents[2]
PROTOS = sorted((ROOT / "protos").glob("kaveri/v1/*.proto"))


def test_the_committed_code_is_what_the_protos_generate(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "generate_protos.py"), str(tmp_path)]
    generated = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert generated.returncode == 0, generated.stderr
    fresh, committed = _files(tmp_path / "kaveri" / "v1"), _files(ROOT / "kaveri" / "v1")
    assert fresh.keys() == committed.keys()
    stale = [name for name in fresh if fresh[name] != committed[name]]
    assert not stale, f"run `make protos`: {', '.join(stale)}"


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> descriptor_pb2.FileDescriptorSet:
    output = tmp_path_factory.mktemp("descriptors") / "all.binpb"
    arguments = ["-I", str(ROOT / "protos"), "--include_source_info", f"--descriptor_set_out={output}"]
    command = [sys.executable, "-m", "grpc_tools.protoc", *arguments, *(str(path) for path in PROTOS)]
    subprocess.run(command, check=True, timeout=60)
    return descriptor_pb2.FileDescriptorSet.FromString(output.read_bytes())


def test_every_message_field_enum_value_service_and_rpc_has_a_comment(
    described: descriptor_pb2.FileDescriptorSet,
) -> None:
    assert len(described.file) == len(PROTOS)
    bare = []
    for file in described.file:
        commented = {tuple(place.path) for place in file.source_code_info.location if place.leading_comments.strip()}
        bare += [f"{file.name}: {name}" for name, path in _names(file) if path not in commented]
    assert not bare


def test_the_comment_check_sees_every_kind_of_name(described: descriptor_pb2.FileDescriptorSet) -> None:
    names = {name for file in described.file for name, _ in _names(file)}
    assert {
        "GenerateRequest",
        "GenerateRequest.prompt",
        "GenerateRequest.text",
        "FinishReason",
        "FinishReason.FINISH_REASON_STOP",
        "InferenceService",
        "InferenceService.Generate",
    } <= names


def test_names_follow_the_buf_style(described: descriptor_pb2.FileDescriptorSet) -> None:
    for file in described.file:
        assert file.package == "kaveri.v1"
        for service in file.service:
            assert service.name.endswith("Service")
            for rpc in service.method:
                assert rpc.input_type == f".kaveri.v1.{rpc.name}Request"
                assert rpc.output_type == f".kaveri.v1.{rpc.name}Response"
        for enum in file.enum_type:
            zero, *_ = enum.value
            assert zero.number == 0
            assert zero.name.endswith("_UNSPECIFIED")


def _names(file: descriptor_pb2.FileDescriptorProto) -> Iterator[tuple[str, tuple[int, ...]]]:
    for i, message in enumerate(file.message_type):
        nested = [each for each in message.nested_type if not each.options.map_entry]
        assert not nested, "the walk below does not look into nested messages"
        assert not message.enum_type, "nor into nested enums"
        yield message.name, (4, i)
        for j, entry in enumerate(message.field):
            yield f"{message.name}.{entry.name}", (4, i, 2, j)
        for j, oneof in enumerate(message.oneof_decl):
            if not oneof.name.startswith("_"):  # Those are `optional` fields.
                yield f"{message.name}.{oneof.name}", (4, i, 8, j)
    for i, enum in enumerate(file.enum_type):
        yield enum.name, (5, i)
        for j, value in enumerate(enum.value):
            yield f"{enum.name}.{value.name}", (5, i, 2, j)
    for i, service in enumerate(file.service):
        yield service.name, (6, i)
        for j, rpc in enumerate(service.method):
            yield f"{service.name}.{rpc.name}", (6, i, 2, j)
