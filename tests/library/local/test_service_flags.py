import pytest

from kaveri.config.services import ServiceKind
from kaveri.errors import ConfigError
from kaveri.local.service_flags import read_service_flags

ROLES = (ServiceKind.ROUTER, ServiceKind.PREFILL, ServiceKind.DECODE)


def test_a_flag_that_is_true_or_false_needs_no_value_there_either() -> None:
    flags = read_service_flags(["--router.vllm-grpc", "--max-batch", "8"], ROLES, ())
    assert flags.of_role == {ServiceKind.ROUTER: ("--vllm-grpc", "true")}
    assert flags.shared == {"max_batch": "8"}
    assert read_service_flags(["--vllm-grpc"], ROLES, ()).shared == {"vllm_grpc": "true"}
    assert read_service_flags(["--vllm-grpc", "off"], ROLES, ()).shared == {"vllm_grpc": "off"}


def test_all_others_need_one() -> None:
    with pytest.raises(ConfigError, match="--max-batch: has no value; write --max-batch VALUE"):
        read_service_flags(["--max-batch", "--router.vllm-grpc"], ROLES, ())
