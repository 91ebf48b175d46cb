"""The stepwise engine on the transformers runner does what every engine must, KV pushed over real sockets."""

from pathlib import Path

import pytest

from kaveri.testing.engine_release import ReleaseConformance
from kaveri.testing.engine_replication import ReplicationConformance
from kaveri.testing.engine_resumption import ResumptionConformance
from tests.support.engine_suite import EngineSuite
from tests.support.plain_transformers import PlainTransformers
from tests.support.tiny_models import make_tiny_model
from tests.support.transformers_harness import CopiedMemoryHarness, TransformersHarness

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen2", max_positions=256, eos_token_id=7)


@pytest.fixture(scope="module")
def reference(model_folder: Path) -> PlainTransformers:
    return PlainTransformers(model_folder, ignore_eos=True)


class TestStepwiseOnTransformers(EngineSuite):
    @pytest.fixture
    def harness(self, model_folder: Path, reference: PlainTransformers, tmp_path: Path) -> TransformersHarness:
        return TransformersHarness(model_folder, tmp_path, reference)


class TestStepwiseOnDeviceMemory(ResumptionConformance, ReplicationConformance, ReleaseConformance):
    @pytest.fixture
    def harness(self, model_folder: Path, reference: PlainTransformers, tmp_path: Path) -> CopiedMemoryHarness:
        return CopiedMemoryHarness(model_folder, tmp_path, reference)
