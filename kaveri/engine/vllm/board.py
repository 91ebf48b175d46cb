"""What the threads of a vLLM engine share beside the lock: its requests, and what the engine thread is to do next."""

import itertools
from concurrent.futures import Future

from kaveri.engine.contract import EngineKey, EngineRequest
from kaveri.engine.phase import Phase
from kaveri.engine.shared import Shared
from kaveri.engine.vllm.account import Account
from kaveri.engine.vllm.hosted import Hosted
from kaveri.kv.layout.layout import KvLayout

_NUMBERS = itertools.count()
"""Of all engines of the process, as vLLM's logits processors are the process's."""


class Board(Shared):
    """Methods are called with the lock held, unless they say otherwise. Also a TransferAccount (transfers.py)."""

    def __init__(self, layout: KvLayout, max_model_len: int, total_blocks: int) -> None:
        super().__init__()
        self.account = Account(total_blocks)
        self.added: list[Hosted] = []
        """Requests that vLLM has not been told of."""
        self.checks: list[Future[None]] = []
        """Integrity checks that the engine thread is asked for."""
        self.woken = False
        """Something is new for the engine thread."""
        self._layout = layout
        self._max_model_len = max_model_len

    def open_prefill(self, request: EngineRequest) -> None:
        """Takes a new prompt. Raises RequestAlreadyExists and NoCapacity, and EngineError once the engine has
        stopped."""
        self.require_alive()
        self._open(Hosted.prefill(f"kaveri-{next(_NUMBERS)}", request, self._layout))

    def adopt(self, key: EngineKey) -> None:
        """A computed prompt without an open push becomes a landed request. Others are ignored."""
        self.require_alive()
        hosted = self.account.prefills.get(key)
        if hosted is not None and hosted.phase is Phase.COMPUTED and hosted.transfer_id is None:
            self.account.adopt(hosted)
            hosted.claim_next(self._layout.block_tokens)
            self.wake()

    def admit(self, key: EngineKey) -> None:
        """A landed request may run. Others are ignored."""
        self.require_alive()
        hosted = self.account.decodes.get(key)
        if hosted is not None and hosted.phase is Phase.LANDED:
            hosted.phase = Phase.WAITING
            self.account.waiting.append(hosted)
            self.wake()

    def wake(self) -> None:
        """The engine thread has something to do."""
        self.woken = True
        self.work.notify()

    # For transfers; see TransferAccount.

    def find_prefill(self, key: EngineKey) -> Hosted | None:
        return self.account.prefills.get(key)

    def open_decode(self, request: EngineRequest) -> Hosted:
        hosted = Hosted.decode(f"kaveri-{next(_NUMBERS)}", request, self._layout)
        self._open(hosted)
        return hosted

    def hold(self, hosted: Hosted, transfer_id: bytes) -> None:
        hosted.transfer_id = transfer_id

    def let_go(self, hosted: Hosted) -> None:
        hosted.transfer_id = None
        if hosted.done:
            self.wake()

    def land(self, hosted: Hosted, first_token_id: int) -> str | None:
        if not hosted.goes_on(self._max_model_len):
            return f"no room behind {self._max_model_len} tokens"
        hosted.computed = len(hosted.token_ids)
        hosted.draw(first_token_id)
        hosted.phase = Phase.LANDED
        return None

    def end(self, hosted: Hosted) -> None:
        self.account.end(hosted)
        self.wake()

    def abort(self, key: EngineKey) -> tuple[Hosted | None, Hosted | None]:
        prefill, decode = self.account.prefills.get(key), self.account.decodes.get(key)
        for hosted in (prefill, decode):
            if hosted is not None:
                self.end(hosted)
        return prefill, decode

    def _open(self, hosted: Hosted) -> None:
        self.account.open(hosted)
        self.added.append(hosted)
        self.wake()
