"""Records of engine tests do not depend on when the engine is closed."""

from typing import cast

from kaveri.engine.contract import DecodeEngine, EngineKey, Landed
from kaveri.errors import EngineError
from kaveri.testing.engine_recorder import EngineRecorder


class _ClosedEngine:
    def admit(self, key: EngineKey) -> None:
        raise EngineError("it is closed")


def test_kv_that_lands_after_the_engine_was_closed_is_recorded() -> None:
    recorder = EngineRecorder(admit_to=cast(DecodeEngine, _ClosedEngine()))
    landed = Landed(EngineKey("r", 1), 4096, 7)
    recorder([landed])
    assert recorder.events == [landed]
