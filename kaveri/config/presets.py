"""Settings that reproduce the systems of papers. Flags, KAVERI_* variables and files override them."""

import enum
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from kaveri.config.services import UP_SECTION, ServiceKind
from kaveri.errors import ConfigError

SettingValue = str | int | float


class Preset(enum.StrEnum):
    """System from a paper, reproduced by a preset: a set of default settings."""

    TETRIINFER = "tetriinfer"
    DISTSERVE = "distserve"
    DEJAVU = "dejavu"
    ACCELLM = "accellm"


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetSettings:
    """Settings that reproduce a paper's system, and the parts of it that are left out."""

    sections: Mapping[str, Mapping[str, SettingValue]]
    """Settings by section of a settings file. Section [up] has the number of instances by role."""
    left_out: tuple[str, ...]
    """Parts of the paper's system that the preset does not enable."""

    def of(self, section: str) -> Mapping[str, SettingValue]:
        return self.sections.get(section, {})

    def require_roles(self, preset: Preset, given: Collection[str]) -> None:
        """Raise ConfigError if `given`, the roles whose count the user set, has one that the preset does not use."""
        own = tuple(name for name in ("prefill", "decode", "colocated") if name in self.of(UP_SECTION))
        for name in given:
            if name not in own:
                reason = f"gives {name} instances, which preset {preset} does not have; it has {' and '.join(own)}"
                raise ConfigError(f"--{name}", reason)


def tetriinfer() -> PresetSettings:
    """Return settings that reproduce TetriInfer (arXiv 2401.11181).

    Prefill: the least loaded instance (section 3.2), shortest prompt first among 16 (3.3.1, 5.1), chunks of 512 tokens
    (3.3.3), answer lengths predicted in parallel (3.3.2). Decode: of two instances with room for the predicted answer,
    that with fewer heavy requests (over 512 prompt or 128 answer tokens, 5.1) per light one (3.3.4); admission reserves
    memory for the low end of the predicted length range (3.4, 5.1). Load reports: every 100 ms (3.2).
    """
    heavy: dict[str, SettingValue] = {"heavy_output_tokens": 128, "heavy_prompt_tokens": 512}
    return PresetSettings(
        sections={
            UP_SECTION: {"prefill": 2, "decode": 2},
            ServiceKind.ROUTER: {"placement_policy": "least-loaded", "monitor_interval_s": 0.1},
            ServiceKind.PREFILL: {
                "chunk_tokens": 512,
                "prefill_policy": "sjf",
                "prefill_sched_batch": 16,
                "prediction": "parallel",
                "decode_placement": "heavy-light",
                **heavy,
            },
            ServiceKind.DECODE: {"decode_policy": "reserve-dynamic", "decode_range_end": "low", **heavy},
        },
        left_out=("instances that change their role after an idle minute (3.5)", "swapping to host memory (3.4)"),
    )


def distserve() -> PresetSettings:
    """Return settings that reproduce DistServe (arXiv 2401.09670), section 4.3: first come, first served, to the
    prefill instance with the shortest queue, then to the least loaded decode instance. KV waits at prefill until decode
    has room. chunk_tokens is the paper's L_m, the prompt tokens that saturate a GPU: `kaveri profile` measures it."""
    return PresetSettings(
        sections={
            UP_SECTION: {"prefill": 2, "decode": 2, "predictor": "none"},
            ServiceKind.ROUTER: {"placement_policy": "least-loaded"},
            ServiceKind.PREFILL: {"prefill_policy": "fcfs", "prediction": "off", "decode_placement": "least-loaded"},
            ServiceKind.DECODE: {"decode_policy": "greedy", "replication": "off"},
        },
        left_out=(
            "prompts longer than chunk_tokens, which it computes whole and Kaveri in chunks (4.3)",
            "planning again by itself when the workload changes (4.3): run `kaveri plan --from-cluster`",
        ),
    )


def dejavu() -> PresetSettings:
    """Return settings that reproduce DéjàVu (arXiv 2403.01876): prefill and decode on separate instances (section
    4.2.1); each decode instance copies every request's KV to the next one (4.2.3). First come, first served."""
    return PresetSettings(
        sections={
            UP_SECTION: {"prefill": 2, "decode": 2, "predictor": "none"},
            ServiceKind.PREFILL: {"prefill_policy": "fcfs", "prediction": "off"},
            ServiceKind.DECODE: {"decode_policy": "greedy", "replication": "ring", "replica_min_tokens": 1},
        },
        left_out=(
            "pipelines of microbatches, and their swapping (4.2.2)",
            "KV of prompts that waits in the token machine's host memory (4.2.1): it waits at prefill",
            "the plan of pipelines (4.2.1): run `kaveri plan pipeline`",
        ),
    )


def accellm() -> PresetSettings:
    """Return settings that reproduce AcceLLM (arXiv 2411.05555): paired instances serve both phases (section 4.1.1) and
    hold copies of each other's KV (4.1.2). Requests go to the least loaded instance."""
    return PresetSettings(
        sections={
            UP_SECTION: {"colocated": 2, "predictor": "none"},
            ServiceKind.ROUTER: {"placement_policy": "least-loaded"},
            ServiceKind.COLOCATED: {
                "prefill_policy": "fcfs",
                "prediction": "off",
                "decode_policy": "greedy",
                "replication": "pair",
                "replica_min_tokens": 1,
            },
        },
        left_out=(
            "one phase at a time on an instance (4.1.1): these compute chunks of prompts beside their batch",
            "requests that move to the partner to balance a pair (4.1.3): copies serve failures only",
        ),
    )


_PRESETS: Mapping[Preset, Callable[[], PresetSettings]] = {
    Preset.TETRIINFER: tetriinfer,
    Preset.DISTSERVE: distserve,
    Preset.DEJAVU: dejavu,
    Preset.ACCELLM: accellm,
}


def preset_settings(preset: Preset) -> PresetSettings:
    return _PRESETS[preset]()
