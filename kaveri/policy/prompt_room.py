"""Decides whether a prompt fits into a pool shared with running answers. Pure: no clock, no I/O."""

from collections.abc import Iterable


def prompt_fits(
    token_count: int, computing: Iterable[int], kept_blocks: int, free_blocks: int, block_tokens: int
) -> bool:
    """Return True if free blocks, less those reserved for other requests, suffice for the prompt.

    The prompt counts one token more: without a block for its first token it would be preempted right after adoption.
    Prompts being computed count the same way, since they hold blocks for their prompts only.

    token_count: of the prompt. computing: token count of each prompt being computed. kept_blocks: free blocks that the
    admission policy reserves for answers.
    """
    promised = sum(-(-(count + 1) // block_tokens) - -(-count // block_tokens) for count in computing)
    return -(-(token_count + 1) // block_tokens) + promised + kept_blocks <= free_blocks
