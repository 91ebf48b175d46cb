"""Tracks the received part of an answer over all calls to routers: each token and character exactly once."""

from array import array
from dataclasses import dataclass, field

from kaveri.errors import Unavailable
from kaveri.v1 import inference_pb2, sampling_pb2
from kaveri.wire.messages import FINISH_FROM_PROTO


@dataclass(eq=False, slots=True)
class Received:
    """Received part of an answer. Refuses a response that does not continue it exactly."""

    wants_prompt: bool = False
    """True if the request asks for prompt_logprobs."""
    prompt_count: int = 0
    """Prompt tokens whose log-probabilities have arrived."""
    prompt_tokens: int = 1
    """Length of the prompt; 1 until the first response."""
    # An array, because garbage collection visits each item of a list, for all answers in one turn of the event loop.
    token_ids: "array[int]" = field(default_factory=lambda: array("I"))
    characters: int = 0
    """Length of the text, in Unicode code points."""
    max_tokens: int = 0
    """Limit of the answer as resolved by the first router; 0 until then."""
    owner: inference_pb2.OwnerHint = field(default_factory=inference_pb2.OwnerHint)
    """Instances that serve the request, as last named by a router."""
    is_complete: bool = False
    """True once the finish reason has arrived."""

    def take(self, response: inference_pb2.GenerateResponse, target: str) -> None:
        """Add the next response. Raises Unavailable if tokens are missing, repeated, or sent after the end or before
        all requested prompt_logprobs. target: the router's address, for the error."""
        if self.is_complete:
            raise Unavailable(f"{target} sent a response behind the end of the answer")
        try:
            finish = FINISH_FROM_PROTO[response.finish_reason]
        except KeyError:
            unknown = f"finish reason {response.finish_reason}, which this client does not know"
            raise Unavailable(f"{target} sent {unknown}: is it of a newer version?") from None
        if response.HasField("prompt_logprobs"):
            self._take_prompt(response.prompt_logprobs, target)
        self.prompt_tokens = response.usage.prompt_tokens or self.prompt_tokens
        expected = len(self.token_ids)
        if self.wants_prompt and response.token_ids and self.prompt_count < self.prompt_tokens:
            had = f"after prompt_logprobs of {self.prompt_count} of the {self.prompt_tokens} tokens of the prompt"
            raise Unavailable(f"{target} sent a token {had}: is it of a former version?")
        if response.token_ids and response.index != expected:
            raise Unavailable(f"{target} sent token {response.index} where {expected} was expected")
        self.token_ids.extend(response.token_ids)
        self.characters += len(response.text)
        if response.max_tokens:
            self.max_tokens = response.max_tokens
        if response.HasField("owner"):
            self.owner.CopyFrom(response.owner)
        self.is_complete = finish is not None

    def _take_prompt(self, report: sampling_pb2.PromptLogprobs, target: str) -> None:
        """Add a part of the prompt's log-probabilities without repeated ones: a router that takes over the request
        sends them from the start."""
        if report.first > self.prompt_count or len(report.token_ids) != len(report.logprobs):
            place = f"position {report.first} of the prompt where {self.prompt_count} was expected"
            raise Unavailable(f"{target} sent prompt_logprobs from {place}")
        seen = min(self.prompt_count - report.first, len(report.logprobs))
        del report.token_ids[:seen], report.logprobs[:seen]
        report.first += seen
        self.prompt_count += len(report.logprobs)

    def rest_of(self, response: inference_pb2.GenerateResponse) -> inference_pb2.GenerateResponse:
        """Strip what was already received from a response (tokens by index, text by offset), and return the response.
        When a request is cancelled, the client may have more tokens than its router. The text that the router then
        releases does not follow those tokens, and is dropped."""
        repeated = len(self.token_ids) - response.index
        is_behind = repeated > len(response.token_ids)
        if repeated > 0:
            del response.token_ids[:repeated]
            response.index = len(self.token_ids)
        if response.text:
            known = self.characters - response.first_character
            response.text = "" if is_behind else response.text[max(0, known) :]
            response.first_character = self.characters
        if response.finish_reason:
            response.usage.completion_tokens = max(response.usage.completion_tokens, len(self.token_ids))
        return response

    def to_proto(self) -> inference_pb2.Received:
        """Encode the received part, for the next router that takes over the request."""
        return inference_pb2.Received(
            token_ids=self.token_ids, characters=self.characters, max_tokens=self.max_tokens, owner=self.owner
        )
