"""kaveri chat: a conversation at the terminal, through the model's chat template."""

import contextlib
import sys
from typing import Annotated

from kaveri.cli import options
from kaveri.cli.options import option
from kaveri.client.defaults import DEFAULT_TARGET, DEFAULT_TIMEOUT_S
from kaveri.errors import KaveriError


def chat(
    target: options.Target = DEFAULT_TARGET,
    model: options.Model = None,
    system: Annotated[str | None, option("System message that opens the conversation.")] = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    timeout_s: options.TimeoutS = DEFAULT_TIMEOUT_S,
) -> None:
    """Talk with a model. Ctrl-C cancels an answer, Ctrl-D leaves."""
    from kaveri.client.request import Message
    from kaveri.client.sync_client import Client
    from kaveri.domain.sampling import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=tuple(stop or ())
    )
    turns = [Message("system", system)] if system is not None else []
    with contextlib.suppress(ImportError):  # Some Python builds lack readline.
        import readline  # noqa: F401
    with Client(options.targets_of(target), timeout_s=timeout_s) as client:
        while True:
            try:
                text = input("> " if sys.stdin.isatty() else "")
            except EOFError:
                return
            except KeyboardInterrupt:
                print()
                continue
            if not text.strip():
                continue
            turns.append(Message("user", text))
            texts: list[str] = []
            try:
                # Ctrl-C may arrive before the stream exists, or while it is closed.
                with client.stream(messages=turns, params=params, model=model) as stream:
                    for chunk in stream:
                        texts.append(chunk.text)
                        sys.stdout.write(chunk.text)
                        sys.stdout.flush()
            except KaveriError as error:
                print(f"kaveri: {error}", file=sys.stderr)
                turns.pop()
                continue
            except KeyboardInterrupt:
                sys.stdout.write(" [cancelled]")
            print()
            turns.append(Message("assistant", "".join(texts)))
