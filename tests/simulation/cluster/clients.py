"""The load of a schedule: each planned request, sent through the SDK in its client's process."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from kaveri.client.async_client import AsyncClient, AsyncStream
from kaveri.errors import KaveriError, RequestAlreadyExists, RequestCancelled, Unavailable
from kaveri.parsers.answer import PLAIN
from tests.simulation.cluster.chats import ChatReader, render_chat
from tests.simulation.cluster.outcomes import RequestOutcome
from tests.simulation.cluster.plan import ScheduledRequest
from tests.simulation.cluster.world import World

_SEND_AGAIN_AFTER_S = 0.1
_SLOWER_EACH_TIME = 5.0
_TAKEN = (Unavailable, RequestCancelled, RequestAlreadyExists)
"""Errors after which a request is sent again, if the plan says so."""


class Clients:
    """Sends requests. One SDK client per client process and router address."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sdks: dict[tuple[str, str], AsyncClient] = {}

    async def send(self, planned: ScheduledRequest, probe: bool = False) -> None:
        """One request, in its client's process, with all its repetitions."""
        world = self._world
        first_s = world.now()
        prompt, params, chat = planned.prompt, planned.params, planned.chat
        form = PLAIN
        if chat is not None:
            prompt, params, form = render_chat(world.tokenizer, chat, params)
        for number, router in enumerate((planned.router, *planned.sends_again), 1):
            if number > 1:
                await asyncio.sleep(_SEND_AGAIN_AFTER_S * _SLOWER_EACH_TIME ** (number - 2))
            outcome = RequestOutcome(
                request_id=planned.request_id,
                router=router,
                prompt=prompt or None,
                text=planned.text or None,
                params=params,
                started_s=world.now(),
                timeout_s=planned.timeout_s,
                process=world.process_of(router),
                send_number=number,
                probe=probe,
                direct=planned.client in world.plan.direct_clients,
                chat=None if chat is None else ChatReader(chat, form),
            )
            world.outcomes.append(outcome)
            world.trace.note("send", f"{planned.request_id} {router} {number}")
            await self._send(planned, outcome, first_s)
            outcome.ended_s = world.now()
            shown = outcome.finish or repr(outcome.error)
            world.trace.note(
                f"outcome:{outcome.finish or type(outcome.error).__name__}",
                f"{planned.request_id} {shown} {len(outcome.token_ids)} tokens",
            )
            if not isinstance(outcome.error, _TAKEN) or outcome.cancelled_s is not None:
                return

    async def _send(self, planned: ScheduledRequest, outcome: RequestOutcome, first_s: float) -> None:
        sdk = self._sdk(planned.client, outcome.router)
        self._world.drawn_ids.next_id = planned.request_id if planned.draws_id else ""
        try:
            stream = sdk.stream(
                planned.text or None,
                prompt_token_ids=planned.prompt or None,
                messages=None if planned.chat is None else planned.chat.messages,
                chat=None if planned.chat is None else planned.chat.options,
                params=planned.params,
                request_id=None if planned.draws_id else planned.request_id,
                timeout_s=planned.timeout_s,
            )
            async with stream, self._cancelling(planned, outcome, sdk, stream):
                async for chunk in stream:
                    outcome.chunks.append(chunk)
                    if outcome.chat is not None:
                        outcome.chat.read(chunk, stream.answer_form)
                    outcome.finish = chunk.finish_reason
                    if planned.read_pause_s:
                        await asyncio.sleep(planned.read_pause_s)
        except KaveriError as error:
            outcome.error = error

    @contextlib.asynccontextmanager
    async def _cancelling(
        self, planned: ScheduledRequest, outcome: RequestOutcome, sdk: AsyncClient, stream: AsyncStream
    ) -> AsyncIterator[None]:
        """Gives the request up when the plan says so."""
        if planned.cancel_after_s is None:
            yield
            return
        world, after_s = self._world, planned.cancel_after_s

        async def cancel() -> None:
            await asyncio.sleep(after_s)
            outcome.cancelled_s = world.now()
            world.trace.note("cancel", planned.request_id)
            if planned.cancels_by_id:
                with contextlib.suppress(KaveriError):
                    await sdk.cancel(planned.request_id, timeout_s=2.0)
            else:
                stream.close()

        task = asyncio.create_task(cancel())
        try:
            yield
        finally:
            task.cancel()

    def end_streams(self) -> None:
        """Ends the streams that living clients keep to decode instances for a while."""
        world = self._world
        for (client, _), sdk in self._sdks.items():
            process = world.clients[client]
            if sdk._direct is not None and not process.dead:
                world.loop.spawn(process, sdk._direct.close())

    def _sdk(self, client: str, router: str) -> AsyncClient:
        life = self._world.lives[router]
        address = f"{router}:{life.port}"
        sdk = self._sdks.get((client, address))
        if sdk is None:
            sdk = self._sdks[client, address] = AsyncClient(address, direct=client in self._world.plan.direct_clients)
            # Known, and asked when this one fails: also by requests that die before their first response.
            lives = (self._world.lives[router.name] for router in self._world.plan.routers)
            sdk._routers.targets.learn(f"{life.name}:{life.port}" for life in lives)
        return sdk
