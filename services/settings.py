"""The settings of every program that reads a configuration file, by the name of its section.

No service imports this: it would import all others. kaveri.programs finds it by name.
"""

from collections.abc import Mapping
from typing import Any

from kaveri.profiling.config import ProfileConfig
from services.gateway.config import GatewayConfig
from services.instance.config import ColocatedConfig, DecodeConfig, PrefillConfig
from services.predictor.config import PredictorConfig
from services.router.config import RouterConfig

SETTINGS: Mapping[str, type[Any]] = {
    "router": RouterConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "colocated": ColocatedConfig,
    "predictor": PredictorConfig,
    "gateway": GatewayConfig,
    "profile": ProfileConfig,
}
