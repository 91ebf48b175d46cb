"""Validates and tokenizes requests, before anything is spent on them."""

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from kaveri.domain.grammar import Grammar
from kaveri.domain.sampling import ResolvedParams, SamplingParams, check_prompt_report, check_token_ids
from kaveri.errors import InvalidArgument, ModelNotFound
from kaveri.parsers.answer import MARKERS, PLAIN, AnswerForm
from kaveri.policy.placement import largest_prompt, max_model_len
from kaveri.text.answer import Answer
from kaveri.text.conversation import Conversation, read_conversation
from kaveri.text.generation_config import SamplingDefaults
from kaveri.text.tokenizer import ModelTokenizer
from kaveri.v1 import inference_pb2
from kaveri.wire.attempts import check_request
from kaveri.wire.messages import grammar_from_proto, params_from_proto
from services.router.accepted_request import NOTHING_RECEIVED, AcceptedRequest, AlreadyReceived, hint_from_proto
from services.router.answer_forms import answer_form, answer_grammar
from services.router.request_placer import RequestPlacer

_SLICE_TOKENS = 16_384
"""Token ids are copied and checked in slices of about a millisecond each. Longer inputs take turns, so that many of
them do not run a slice each in one iteration of the event loop."""


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt's tokens, and for a conversation how its answer is written and read."""

    token_ids: list[int]
    form: AnswerForm = PLAIN
    grammar: Grammar | None = None
    """The grammar of the answer, calls of tools included."""
    shows_special: bool = False
    """Markers of calls or reasoning are special tokens, which the text must have."""


CheckGrammar = Callable[[Grammar, float], Awaitable[None]]
"""Raises InvalidArgument for a grammar that engines cannot compile; its second argument is the deadline."""

Prompt = str | Sequence[int] | Conversation
"""Text, token ids or a conversation; not empty. Token ids of a message are not copied before their count is checked."""


class Intake:
    """Validates, tokenizes and completes incoming requests."""

    def __init__(
        self,
        model: str,
        tokenizer: ModelTokenizer,
        placer: RequestPlacer,
        defaults: SamplingDefaults,
        check_grammar: CheckGrammar,
        form: AnswerForm,
    ) -> None:
        """form: how the model's answers are read."""
        self._form = form
        self._check_grammar = check_grammar
        self._model = model
        self.tokenizer = tokenizer
        self.defaults = defaults
        self._placer = placer
        self._turn = asyncio.Lock()

    def check_model(self, model: str) -> None:
        """Raise ModelNotFound unless `model` is empty or the served model's name."""
        if model not in ("", self._model):
            raise ModelNotFound(model, (self._model,))

    def check(self, request: inference_pb2.GenerateRequest, request_id: str) -> SamplingParams:
        """Validate what needs neither tokens nor limits of instances. Returns the sampling parameters.

        request_id: the id under which the router serves the request. Raises InvalidArgument and ModelNotFound."""
        self.check_model(request.model)
        check_request(request_id, request.session, request.secret)
        params = params_from_proto(request.params, SamplingParams) if request.HasField("params") else SamplingParams()
        if not request.session and request.HasField("received"):
            raise InvalidArgument("received", "set", "unset in session 0")
        same_in_every_session = {
            "request_id": bool(request.request_id),
            "secret": bool(request.secret),
            "params.seed": params.seed is not None,
        }
        for field, is_given in same_in_every_session.items():
            if request.session and not is_given:
                raise InvalidArgument(field, None, "set when session is above 0")
        return params

    async def accept(
        self,
        request: inference_pb2.GenerateRequest,
        request_id: str,
        params: SamplingParams,
        arrived_s: float,
        deadline_s: float,
        *,
        is_public: bool,
    ) -> AcceptedRequest:
        """Tokenize a request and fill in its defaults. params: from check(). Times are time.monotonic()'s.

        Raises InvalidArgument, naming field, value and limit; Unavailable if no instances serve the model."""
        params.check_known_ids(self.tokenizer.vocab_size)
        prompt = _prompt_of(request)
        view = await self._placer.wait_for_instances(deadline_s)
        limit = max_model_len(view, self._model)
        tokenized = await self._tokenize(prompt, limit - 1, deadline_s, params.grammar)
        token_ids = tokenized.token_ids
        largest = largest_prompt(view, self._model)
        if largest is not None and len(token_ids) > largest:
            raise InvalidArgument(
                "prompt", f"{len(token_ids)} tokens", f"at most {largest} tokens: no decode instance holds more"
            )
        check_prompt_report(params, len(token_ids))
        if tokenized.grammar is not None:
            await self._check_grammar(tokenized.grammar, deadline_s)
            params = dataclasses.replace(params, grammar=tokenized.grammar)
        if tokenized.shows_special:
            params = dataclasses.replace(params, skip_special_tokens=False)
        room = limit - len(token_ids)
        for field, tokens in (("max_tokens", params.max_tokens or 0), ("min_tokens", params.min_tokens)):
            if tokens > room:
                together = f"the prompt has {len(token_ids)} tokens, prompt and answer together at most {limit}"
                raise InvalidArgument(f"params.{field}", tokens, f"at most {room}: {together}")
        resolved = self._resolved(params, room, request.received.max_tokens)
        received = NOTHING_RECEIVED
        if request.HasField("received"):
            most_received = min(room, resolved.max_tokens or room)
            received_ids = await self._checked("received.token_ids", request.received.token_ids, most_received)
            owner = hint_from_proto(request.received.owner)
            received = AlreadyReceived(tuple(received_ids), request.received.characters, owner, owner)
        return AcceptedRequest(
            request_id=request_id,
            prompt_token_ids=tuple(token_ids),
            params=resolved,
            room=room,
            arrived_s=arrived_s,
            deadline_s=deadline_s,
            session=request.session,
            secret=request.secret,
            # Its reader shows the secret, and clients with API keys know the public port alone.
            direct=request.direct and bool(request.secret) and not is_public,
            received=received,
            form=tokenized.form,
        )

    def _resolved(self, params: SamplingParams, room: int, resolved_tokens: int) -> ResolvedParams:
        """Fill in max_tokens, seed and defaults. resolved_tokens: an earlier session's max_tokens; 0: none."""
        most_tokens = room
        if resolved_tokens:
            params = dataclasses.replace(params, max_tokens=min(resolved_tokens, params.max_tokens or resolved_tokens))
        elif self.defaults.most_tokens is not None:
            most_tokens = min(room, self.defaults.most_tokens)
        resolved = params.resolved(self.defaults.params)
        return dataclasses.replace(
            resolved,
            bad_token_ids=self.tokenizer.spellings(params.bad_words) if params.bad_words else (),
            max_tokens=min(most_tokens, resolved.max_tokens or room),
            seed=secrets.randbits(64) if params.seed is None else params.seed,
        )

    async def tokenize(
        self, request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest, deadline_s: float
    ) -> tuple[TokenizedPrompt, int]:
        """Tokenize a request's prompt. Returns it and the model's context length. Raises like accept()."""
        prompt, grammar = _prompt_of(request), None
        if isinstance(request, inference_pb2.TokenizeRequest) and request.HasField("grammar"):
            grammar = grammar_from_proto(request.grammar)
        limit = max_model_len(await self._placer.wait_for_instances(deadline_s), self._model)
        return await self._tokenize(prompt, limit - 1, deadline_s, grammar), limit

    async def detokenize(self, token_ids: Sequence[int], deadline_s: float) -> str:
        """Decode token ids, at most as many as the model's context length, to text. Raises like accept()."""
        limit = max_model_len(await self._placer.wait_for_instances(deadline_s), self._model)
        if len(token_ids) > limit:
            raise InvalidArgument("token_ids", f"{len(token_ids)} tokens", f"at most {limit} tokens")
        return await self.tokenizer.decode(token_ids, deadline_s)

    async def begin_answer(self, accepted: AcceptedRequest) -> Answer:
        """Create the request's output, which begins after the tokens and text that the client already has. Raises
        InvalidArgument if these tokens have less text than the client claims."""
        received, params = accepted.received, accepted.params
        detokenizer = self.tokenizer.detokenizer(
            accepted.prompt_token_ids,
            params.stop,
            params.min_tokens,
            received.characters,
            skip_special_tokens=params.skip_special_tokens,
        )
        # The prompt's logprobs come before the first token, so a client with a token has them.
        is_reported = params.prompt_logprobs is not None and not received.token_ids
        answer = Answer(detokenizer, accepted.prompt_token_ids if is_reported else ())
        async with self._turn if len(received.token_ids) > _SLICE_TOKENS else contextlib.nullcontext():
            missing = await answer.go_on_after(received.token_ids, received.characters, params.stop_token_ids)
        if missing:
            limit = f"at most {received.characters - missing}: the {len(received.token_ids)} tokens have no more"
            raise InvalidArgument("received.characters", received.characters, limit)
        return answer

    async def _tokenize(
        self, prompt: Prompt, max_tokens: int, deadline_s: float, grammar: Grammar | None
    ) -> TokenizedPrompt:
        """Tokenize a prompt. grammar: of the request."""
        form = PLAIN
        match prompt:
            case str():
                field = "prompt.text"
                token_ids = await self.tokenizer.encode(prompt, max_tokens, deadline_s)
            case Conversation():
                field = "prompt.messages"
                token_ids, end = await self.tokenizer.encode_chat(prompt, max_tokens, deadline_s)
                form = answer_form(self._form, prompt, end)
                grammar = answer_grammar(form, prompt, grammar, self.tokenizer.backend.token_to_id)
            case _:
                token_ids = await self._checked("prompt.token_ids", prompt, max_tokens)
                return TokenizedPrompt(token_ids, form, grammar)
        if not token_ids:
            raise InvalidArgument(field, "text without a token", "at least one token long")
        return TokenizedPrompt(token_ids, form, grammar, form != PLAIN and self.tokenizer.has_special(MARKERS))

    async def _checked(self, field: str, prompt: Sequence[int], max_tokens: int) -> list[int]:
        if len(prompt) > max_tokens:
            name = field.removesuffix("prompt.token_ids") or "prompt"
            raise InvalidArgument(name, f"{len(prompt)} tokens", f"at most {max_tokens} tokens")
        token_ids: list[int] = []
        async with self._turn if len(prompt) > _SLICE_TOKENS else contextlib.nullcontext():
            for start in range(0, len(prompt), _SLICE_TOKENS):
                part = prompt[start : start + _SLICE_TOKENS]
                check_token_ids(field, part, self.tokenizer.vocab_size)
                token_ids += part
                if len(token_ids) < len(prompt):
                    await asyncio.sleep(0)
        return token_ids


def _prompt_of(request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest) -> Prompt:
    """Return the request's prompt, in its given form. Raises InvalidArgument if it is missing or empty."""
    match request.WhichOneof("prompt"):
        case "text":
            if not request.text:
                raise InvalidArgument("prompt.text", "", "at least one token long")
            return request.text
        case "token_ids":
            assert isinstance(request, inference_pb2.GenerateRequest)
            if not request.token_ids.ids:
                raise InvalidArgument("prompt.token_ids", [], "at least one token long")
            return request.token_ids.ids
        case "messages":
            return read_conversation(request.messages)
        case _:
            raise InvalidArgument("prompt", None, "given as text, token_ids or messages")
