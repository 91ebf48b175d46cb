"""Implements the calls of an engine that computes on its own thread. Subclasses build its parts and make the steps."""

import threading
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from kaveri.domain.grammar import Grammar
from kaveri.engine.blame import StepMember
from kaveri.engine.contract import EngineInfo, EngineKey, EngineListener, EngineRequest, EngineStats
from kaveri.engine.copier import CopyAccount, CopyOwner
from kaveri.engine.copier_thread import CopierThread
from kaveri.engine.shared import Shared
from kaveri.engine.transfers import TransferAccount, TransferOwner, Transfers
from kaveri.errors import InvalidArgument
from kaveri.kv.transfer.flow import KvFlow
from kaveri.kv.transfer.ticket import Ticket
from kaveri.telemetry.logs import get_logger
from kaveri.text.grammars import Grammars

_CLOSE_TIMEOUT_S = 5.0


class EngineOwner(TransferOwner, CopyOwner, Protocol):
    """A request of a ThreadedEngine, whose KV can be pushed, received, and copied to a replica."""


OwnerT = TypeVar("OwnerT", bound=EngineOwner)


class EngineAccount(TransferAccount[OwnerT], CopyAccount[OwnerT], Protocol[OwnerT]):
    """Interface to all requests of a ThreadedEngine and their KV blocks. The caller holds the engine's lock."""

    def open_prefill(self, request: EngineRequest) -> OwnerT:
        """Allocate blocks for the request's prompt and queue it. Raises RequestAlreadyExists and NoCapacity."""

    def adopt(self, key: EngineKey) -> None:
        """Turn a computed prompt without an open push into a decode request that waits for admit(). Ignores others."""

    def admit(self, key: EngineKey) -> None:
        """Add a request whose KV has arrived to the running batch at the next step. Ignores others."""

    def stats(self) -> EngineStats:
        """Snapshot of the requests' load; takes time in proportion to their number."""

    def clear(self) -> None:
        """Remove all requests. Called when no step runs and no transfer is open any more."""


class ThreadedEngine(Generic[OwnerT]):
    """The methods of PrefillEngine and DecodeEngine (contract.py) that do not depend on how steps are made."""

    def __init__(
        self,
        info: EngineInfo,
        shared: Shared,
        account: EngineAccount[OwnerT],
        transfers: Transfers[OwnerT],
        copier: CopierThread[OwnerT],
        grammars: Grammars,
    ) -> None:
        self._grammars = grammars
        self.info = replace(info, kv_endpoints=transfers.endpoints)
        self._shared = shared
        self._account = account
        self._transfers = transfers
        self._copier = copier
        self._thread = threading.Thread(target=self._run, name="kaveri-engine", daemon=True)

    def start(self, listener: EngineListener) -> None:
        self._shared.listener = listener
        self._thread.start()
        # It may have broken before the listener was set.
        self._shared.publish()

    def close(self) -> None:
        self._shared.close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_TIMEOUT_S)
        # First, while ranks still respond.
        self._copier.close()
        self._transfers.close()
        self._grammars.close()
        if self._thread.is_alive():
            get_logger().warning("engine_close_timed_out", waited_s=_CLOSE_TIMEOUT_S)
            return
        with self._shared.lock:
            self._account.clear()
            self._transfers.forget()

    def prepare(self, grammar: Grammar) -> "Future[None]":
        return self._grammars.prepare(grammar)

    def stats(self) -> EngineStats:
        with self._shared.lock:
            return self._shared.counted(self._account.stats())

    def kv_flow(self) -> KvFlow:
        return self._transfers.flow()

    def abort(self, key: EngineKey) -> None:
        self._transfers.abort(key)
        self._copier.wake()

    def prefill(self, request: EngineRequest) -> None:
        self.info.require_servable(request)
        with self._shared.lock:
            self._shared.require_alive()
            self._account.open_prefill(request)

    def push_to(self, key: EngineKey, ticket: Ticket) -> None:
        self._transfers.push_to(key, ticket)

    def adopt(self, key: EngineKey) -> None:
        with self._shared.lock:
            self._shared.require_alive()
            self._account.adopt(key)
        self._shared.publish()

    def admit(self, key: EngineKey) -> None:
        """Let a request whose KV has arrived join the running batch; ignores others. Raises EngineError if stopped."""
        with self._shared.lock:
            self._shared.require_alive()
            self._account.admit(key)

    def replicate(self, key: EngineKey, ticket: Ticket) -> None:
        if not self.info.can_replicate:
            raise InvalidArgument("engine", "of more ranks than KV heads", "one that copies KV to replicas")
        self._copier.copier.replicate(key, ticket)

    def release(self, key: EngineKey, timeout_s: float) -> None:
        self._copier.copier.release(key, timeout_s)

    def _run(self) -> None:
        try:
            self._loop()
        # After any exception in a step, even SystemExit, the state of model and cache is unknown: no request may be
        # left waiting for tokens.
        except BaseException as error:
            self._shared.stop(repr(error), self._members())
            get_logger().exception("engine_failed", error=repr(error))
        finally:
            if self._shared.broken is not None:
                self._transfers.close()

    def _loop(self) -> None:
        """Make steps until the engine is closed."""
        raise NotImplementedError

    def _members(self) -> Collection[StepMember]:
        """Return the unfinished requests of the current step."""
        raise NotImplementedError
