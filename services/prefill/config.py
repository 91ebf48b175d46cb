"""The settings of an instance's prefill phase."""

from dataclasses import dataclass
from typing import ClassVar

from kaveri.addresses import address_text
from kaveri.config.settings import setting
from kaveri.hosting.config import InstanceConfig
from kaveri.hosting.policy_settings import DECODE_PLACEMENTS, ORDERINGS
from kaveri.policy.ordering import DEFAULT_SCHEDULING_BATCH, AnyOrdering, OrderingPolicy
from kaveri.policy.placement import AnyDecodePlacement, DecodePlacementPolicy
from kaveri.policy.prediction import PredictionMode


@dataclass(frozen=True, kw_only=True)
class PromptConfig(InstanceConfig):
    """Settings of an instance's prefill side: queue, length predictions, and choice of the decode instance."""

    HELP_TITLE: ClassVar = "Prompts"

    max_queue: int = setting(
        "requests that wait for the engine; more are refused with RESOURCE_EXHAUSTED", 256, least=1
    )
    prefill_policy: AnyOrdering = setting(  # noqa: RUF009
        "order of waiting prompts: fcfs, sjf, ljf or a plug-in", OrderingPolicy.FCFS, ORDERINGS.parse
    )
    prefill_sched_batch: int = setting(
        "prompts that are ordered together; a prompt is overtaken by fewer than this",
        DEFAULT_SCHEDULING_BATCH,
        least=1,
    )
    prediction: PredictionMode = setting(  # noqa: RUF009
        "when a predictor is asked for the answer's length: parallel (beside the first chunk), sequential (before the "
        "queue) or off",
        PredictionMode.PARALLEL,
    )
    prediction_budget_s: float = setting("sequential: seconds that a request waits for its prediction", 0.05, above=0)
    predictor_address: str = setting("predictor to ask, host:port; empty: those found in the cluster", "", address_text)
    decode_placement: AnyDecodePlacement = setting(  # noqa: RUF009
        "how a decode instance is chosen: power-of-two, heavy-light, least-loaded, round-robin, random, imbalance "
        "(the worst case) or a plug-in",
        DecodePlacementPolicy.POWER_OF_TWO,
        DECODE_PLACEMENTS.parse,
    )
