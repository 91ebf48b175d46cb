"""What a client has received of one answer, over all its sessions: each token, character and the end exactly once."""

from array import array

from kaveri.errors import Unavailable
from kaveri.v1 import inference_pb2, sampling_pb2
from kaveri.wire.messages import finish_from_proto


class Received:
    """Grows with each response. A response that does not go on exactly behind the former ones is refused."""

    def __init__(self, wants_prompt: bool = False) -> None:
        """wants_prompt: whether the request asks for prompt_logprobs."""
        self._wants_prompt = wants_prompt
        self.prompt_count = 0
        """Tokens of the prompt whose log-probabilities have come."""
        self._prompt_tokens = 1
        """Of the prompt, as the first response counts them; until then at least one."""
        # Garbage collection goes over each item of a list, of all answers in one turn of the event loop.
        self.token_ids: array[int] = array("I")
        self.characters = 0
        """Of text, in Unicode code points."""
        self.max_tokens = 0
        """As the first router has resolved it; 0: no response has said it."""
        self.owner = inference_pb2.OwnerHint()
        """The instances that had the request last."""
        self.is_complete = False
        """Whether the finish reason has come."""

    def take(self, response: inference_pb2.GenerateResponse, target: str) -> None:
        """Takes the next response in. Raises Unavailable when tokens are missing or repeated or come behind the end,
        and when one comes before all of the wanted prompt_logprobs."""
        if self.is_complete:
            raise Unavailable(f"{target} sent a response behind the end of the answer")
        try:
            finish = finish_from_proto(response.finish_reason)
        except KeyError:
            unknown = f"finish reason {response.finish_reason}, which this client does not know"
            raise Unavailable(f"{target} sent {unknown}: is it of a newer version?") from None
        if response.HasField("prompt_logprobs"):
            self._take_prompt(response.prompt_logprobs, target)
        self._prompt_tokens = response.usage.prompt_tokens or self._prompt_tokens
        expected = len(self.token_ids)
        if self._wants_prompt and response.token_ids and self.prompt_count < self._prompt_tokens:
            had = f"after prompt_logprobs of {self.prompt_count} of the {self._prompt_tokens} tokens of the prompt"
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
        """Removes what has come already from the report: a router that takes the request over begins it again."""
        if report.first > self.prompt_count or len(report.token_ids) != len(report.logprobs):
            place = f"position {report.first} of the prompt where {self.prompt_count} was expected"
            raise Unavailable(f"{target} sent prompt_logprobs from {place}")
        seen = min(self.prompt_count - report.first, len(report.logprobs))
        del report.token_ids[:seen], report.logprobs[:seen]
        report.first += seen
        self.prompt_count += len(report.logprobs)

    def rest_of(self, response: inference_pb2.GenerateResponse) -> inference_pb2.GenerateResponse:
        """The response without what was received: tokens by their index, text by its place in the answer.

        The client may have more tokens than a router knows when the request is cancelled. The text that the router then
        releases is not what follows those tokens, so it is dropped.
        """
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
        """What the next session's router must know."""
        return inference_pb2.Received(
            token_ids=self.token_ids, characters=self.characters, max_tokens=self.max_tokens, owner=self.owner
        )
