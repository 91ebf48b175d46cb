from collections.abc import Iterator

import pytest

from kaveri.models import KAVERI_TINY, resolve_model
from kaveri.text.tokenizer import ModelTokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Iterator[ModelTokenizer]:
    tokenizer = ModelTokenizer.load(resolve_model(KAVERI_TINY))
    yield tokenizer
    tokenizer.close()
