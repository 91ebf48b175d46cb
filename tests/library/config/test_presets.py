import pytest

from kaveri.config.presets import Preset, preset_settings
from kaveri.config.services import UP_SECTION, ServiceKind
from kaveri.config.settings import read_settings
from kaveri.errors import ConfigError
from kaveri.policy.admission import AdmissionPolicy
from kaveri.policy.ordering import OrderingPolicy
from kaveri.policy.placement import DecodePlacementPolicy, PlacementPolicy
from kaveri.policy.prediction import PredictionMode
from kaveri.policy.replication import ReplicationMode
from kaveri.programs import settings_types

EXPECTED = {
    (Preset.TETRIINFER, ServiceKind.ROUTER): {"placement_policy": PlacementPolicy.LEAST_LOADED},
    (Preset.TETRIINFER, ServiceKind.PREFILL): {
        "chunk_tokens": 512,
        "prefill_policy": OrderingPolicy.SJF,
        "prefill_sched_batch": 16,
        "prediction": PredictionMode.PARALLEL,
        "decode_placement": DecodePlacementPolicy.HEAVY_LIGHT,
    },
    (Preset.TETRIINFER, ServiceKind.DECODE): {"decode_policy": AdmissionPolicy.RESERVE_DYNAMIC},
    (Preset.DISTSERVE, ServiceKind.ROUTER): {"placement_policy": PlacementPolicy.LEAST_LOADED},
    (Preset.DISTSERVE, ServiceKind.PREFILL): {
        "prefill_policy": OrderingPolicy.FCFS,
        "prediction": PredictionMode.OFF,
        "decode_placement": DecodePlacementPolicy.LEAST_LOADED,
    },
    (Preset.DISTSERVE, ServiceKind.DECODE): {"decode_policy": AdmissionPolicy.GREEDY},
    (Preset.DEJAVU, ServiceKind.DECODE): {"replication": ReplicationMode.RING, "replica_min_tokens": 1},
    (Preset.ACCELLM, ServiceKind.COLOCATED): {"replication": ReplicationMode.PAIR, "replica_min_tokens": 1},
}


@pytest.mark.parametrize(("preset", "role"), EXPECTED)
def test_services_read_the_settings_of_a_preset(preset: Preset, role: ServiceKind) -> None:
    values = preset_settings(preset).of(role)
    words = [text for name, value in values.items() for text in ("--" + name.replace("_", "-"), str(value))]
    required = {"KAVERI_REDIS_URL": "redis://localhost", "KAVERI_INSTANCE_ID": "one"}
    read = read_settings(settings_types()[role], f"kaveri {role}", words, required).config
    expected = EXPECTED[preset, role]
    assert {name: getattr(read, name) for name in expected} == expected


@pytest.mark.parametrize("preset", Preset)
def test_a_role_that_a_preset_does_not_have_is_refused(preset: Preset) -> None:
    settings = preset_settings(preset)
    other = "prefill" if "colocated" in settings.of(UP_SECTION) else "colocated"
    with pytest.raises(ConfigError, match=f"--{other}: gives {other} instances, which preset {preset} does not have"):
        settings.require_roles(preset, [other])
    settings.require_roles(preset, [name for name in settings.of(UP_SECTION) if name != "predictor"])
