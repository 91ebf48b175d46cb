"""Whether a prompt fits into a pool that running answers also use. Pure: no clock, no I/O."""

from collections.abc import Iterable


def prompt_fits(
    token_count: int, computing: Iterable[int], kept_blocks: int, free_blocks: int, block_tokens: int
) -> bool:
    """A decode instance's rule for reservations: enough free blocks beside those kept for other requests.

    Counts one token more than the prompt: without a block for its first token it would be preempted immediately after
    adoption. The prompts being computed count the same way, since they hold blocks for their prompts only.

    token_count: of the prompt. computing: of each prompt that is being computed. kept_blocks: free ones that the
    admission policy keeps for answers.
    """
    promised = sum(-(-(count + 1) // block_tokens) - -(-count // block_tokens) for count in computing)
    return -(-(token_count + 1) // block_tokens) + promised + kept_blocks <= free_blocks
