"""Flags that several commands share."""

from typing import Annotated

import typer

Target = Annotated[
    str, typer.Option(help="Router to ask, HOST:PORT; several with commas between them.", envvar="KAVERI_TARGET")
]
Model = Annotated[str | None, typer.Option(help="Model to ask. Unset: the only one that is served.")]
MaxTokens = Annotated[int | None, typer.Option(help="Most tokens to generate. Unset: all that fit.")]
Temperature = Annotated[float, typer.Option(help="Divides the logits. 0: the same answer every time.")]
TopP = Annotated[float, typer.Option(help="Draw from the smallest set of tokens that reaches this probability.")]
TopK = Annotated[int, typer.Option(help="Draw from this many most likely tokens. 0: all.")]
Seed = Annotated[int | None, typer.Option(help="Makes draws repeatable. Unset: random.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the answer. May be given several times.")]
KeyLimit = Annotated[int, typer.Option(help="Limit of this key. 0: none.")]
TimeoutS = Annotated[float, typer.Option(help="Seconds until the request is given up.")]


def targets_of(text: str) -> tuple[str, ...]:
    """The routers that --target names. What is no address, the client refuses."""
    return tuple(part.strip() for part in text.split(","))
