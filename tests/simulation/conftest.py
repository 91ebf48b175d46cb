"""What the tests of the simulation share."""

from collections.abc import Callable

import pytest

from kaveri.text.tokenizer import ModelTokenizer
from tests.simulation.cluster.plan import Plan
from tests.simulation.cluster.schedule import ScheduleResult, run_schedule, simulated_tokenizer

Run = Callable[[Plan], ScheduleResult]


@pytest.fixture(scope="session")
def tokenizer() -> ModelTokenizer:
    return simulated_tokenizer()


@pytest.fixture
def run(tokenizer: ModelTokenizer) -> Run:
    """Runs a plan and fails the test with its violations, the plan and the end of its trace."""

    def run(plan: Plan) -> ScheduleResult:
        result = run_schedule(plan, tokenizer, lines=True)
        if result.violations:
            pytest.fail("\n".join((str(plan), *result.lines[-80:], *result.violations)), pytrace=False)
        return result

    return run
