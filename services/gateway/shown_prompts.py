"""What of its prompts a request wants to see: their text before the answers, their token ids beside them."""

import asyncio
from dataclasses import dataclass, replace

from kaveri.client.async_client import AsyncClient
from services.gateway.asked import Asked, Prompt, is_token_ids


@dataclass(frozen=True, slots=True)
class ShownPrompt:
    """One prompt, as its answers show it."""

    text: str = ""
    """Stands before the answer's own. Empty: it was not asked for."""
    token_ids: tuple[int, ...] | None = None
    """None: they were not asked for."""


async def show_prompts(client: AsyncClient, asked: Asked) -> tuple[Asked, list[ShownPrompt]]:
    """The request, with token ids for its prompts where those are shown, so that they are the ones that are answered;
    and what is shown of each prompt. Raises KaveriErrors."""
    if not asked.echo and not asked.return_token_ids:
        return asked, [ShownPrompt()] * len(asked.prompts)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_show(client, asked, prompt)) for prompt in asked.prompts]
    shown = [task.result() for task in tasks]
    if asked.return_token_ids:
        asked = replace(asked, prompts=tuple(each.token_ids or () for each in shown))
    return asked, shown


async def _show(client: AsyncClient, asked: Asked, prompt: Prompt) -> ShownPrompt:
    text, token_ids = "", None
    if asked.echo:
        text = prompt if isinstance(prompt, str) else await client.detokenize(prompt, model=asked.model)  # type: ignore[arg-type]
    if asked.return_token_ids:
        if isinstance(prompt, str):
            token_ids = await client.tokenize(prompt, model=asked.model)
        elif is_token_ids(prompt):
            token_ids = prompt  # type: ignore[assignment]
        else:
            token_ids = await client.tokenize(messages=prompt, model=asked.model)  # type: ignore[arg-type]
    return ShownPrompt(text, token_ids)
