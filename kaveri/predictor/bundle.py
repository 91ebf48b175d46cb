"""Trained length predictor in a folder: a Hugging Face sequence classifier, the manifest, and, if the classifier has
its own tokenizer, subfolders with its and the served model's. Imports torch only when one is loaded."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kaveri.domain.length import TokenRange
from kaveri.errors import ConfigError, InvalidArgument
from kaveri.extras import lacks
from kaveri.models import bundled_predictor
from kaveri.predictor import buckets
from kaveri.predictor.manifest import Manifest, read_manifest

if TYPE_CHECKING:
    import torch

OWN_TOKENIZER = "tokenizer"
"""Folder of the classifier's tokenizer."""
SERVED_TOKENIZER = "served_tokenizer"
"""Folder of the served model's tokenizer."""


class LengthPredictor:
    """Trained classifier that predicts the length range of answers. predict() is for one thread at a time."""

    def __init__(self, manifest: Manifest, classifier: Any, retokenizer: "Retokenizer | None") -> None:
        self.model = manifest.model
        """Served name of the model that the predictor was trained for."""
        self.granularity = manifest.granularity
        """Tokens per bucket."""
        self.bucket_count = manifest.bucket_count
        self.version = manifest.version
        """Digest that changes with weights and buckets."""
        self.vocab_size = manifest.vocab_size
        """Vocabulary size of the served model: prompts have token ids in [0, vocab_size)."""
        self.max_prompt_tokens = manifest.max_prompt_tokens
        """Max prompt length; longer prompts are truncated, see cut_prompt()."""
        self._longest_answer_tokens = manifest.longest_answer_tokens
        self._classifier = classifier
        self._retokenizer = retokenizer
        self._pad_token_id = int(classifier.config.pad_token_id)

    @classmethod
    def load(cls, path: str, *, device: str = "cpu") -> "LengthPredictor":
        """Load a predictor from a folder, or a bundled model's by name, verifying digests. Blocks for seconds. device:
        a torch device; weights are float32. Raises ConfigError("predictor") without torch, or for missing or invalid
        files."""
        folder = Path(bundled_predictor(path) or path)
        manifest = read_manifest(folder)
        try:
            import torch
            from transformers import AutoModelForSequenceClassification
        except ImportError as error:
            raise ConfigError("predictor", lacks("torch", "transformers")) from error
        # transformers and safetensors raise many types of errors, and the folder is external input.
        try:
            classifier = AutoModelForSequenceClassification.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True
            )
            classifier.to(device)
            retokenizer = Retokenizer.load(folder, classifier.config) if manifest.own_tokenizer else None
        except Exception as error:
            reason = (str(error) or type(error).__name__).partition("\n")[0]
            raise ConfigError("predictor", f"{folder} cannot be loaded: {reason}") from error
        classes, embedded = int(classifier.config.num_labels), int(classifier.get_input_embeddings().num_embeddings)
        if classes != manifest.bucket_count:
            reason = f"{folder} is mismatched: {classes} classes for {manifest.bucket_count} buckets"
            raise ConfigError("predictor", reason)
        if retokenizer is None and embedded < manifest.vocab_size:
            reason = f"{folder} is mismatched: it reads {embedded} token ids, its model has {manifest.vocab_size}"
            raise ConfigError("predictor", reason)
        if classifier.config.pad_token_id is None:
            raise ConfigError("predictor", f"{folder} is mismatched: its config.json has no pad_token_id")
        return cls(manifest, classifier.eval(), retokenizer)

    def predict(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the probability of each bucket of answer lengths for each prompt; each row sums to 1. Blocks.

        prompts: token ids of the served model. Prompts with lengths between the same powers of two form one batch, so
        padding at most doubles the work. Raises InvalidArgument for an empty prompt or unknown ids.
        """
        if not prompts:
            return []
        for place, prompt in enumerate(prompts):
            if not prompt:
                raise InvalidArgument(f"prompts[{place}]", "", "at least one token")
            worst = max(prompt, key=lambda token_id: token_id if token_id >= 0 else self.vocab_size - token_id)
            if not 0 <= worst < self.vocab_size:
                raise InvalidArgument(f"prompts[{place}]", worst, f"token ids in [0, {self.vocab_size})")
        rows = [cut_prompt(prompt, self.max_prompt_tokens) for prompt in prompts]
        if self._retokenizer is not None:
            rows = self._retokenizer.encode(rows)
        return self._classify(rows)

    def range_of(self, bucket: int) -> TokenRange:
        """Return the answer lengths in a bucket. Raises IndexError for an unknown bucket."""
        return buckets.range_of(bucket, self.granularity, self.bucket_count, self._longest_answer_tokens)

    def _classify(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        import torch

        alike: dict[int, list[int]] = {}
        for place, row in enumerate(rows):
            alike.setdefault((len(row) - 1).bit_length(), []).append(place)
        device = self._classifier.device
        found: list[list[float]] = [[] for _ in rows]
        for places in alike.values():
            input_ids, mask = pad_rows([rows[place] for place in places], self._pad_token_id)
            with torch.inference_mode():
                logits = self._classifier(input_ids=input_ids.to(device), attention_mask=mask.to(device)).logits
            for place, probabilities in zip(places, logits.double().softmax(dim=-1).tolist(), strict=True):
                found[place] = probabilities
        return found


class Retokenizer:
    """Converts token ids of the served model to those of the classifier, by way of text."""

    def __init__(self, served: Any, own: Any, max_tokens: int) -> None:
        """served, own: fast tokenizers of the served model and the classifier. max_tokens: the classifier's limit."""
        self._served = served.backend_tokenizer
        self._own = own
        self._max_tokens = max_tokens

    @classmethod
    def load(cls, folder: Path, config: Any) -> "Retokenizer":
        from transformers import AutoTokenizer

        served, own = (
            AutoTokenizer.from_pretrained(folder / name, local_files_only=True)
            for name in (SERVED_TOKENIZER, OWN_TOKENIZER)
        )
        return cls(served, own, max_input_tokens(config, own))

    def encode(self, prompts: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """Convert prompts, truncated to the classifier's limit; each has at least one token."""
        # Special tokens are dropped: the classifier does not know the roles of the served model's chats.
        texts = self._served.decode_batch([list(prompt) for prompt in prompts], skip_special_tokens=True)
        encoded = self._own(texts, verbose=False)["input_ids"]
        return [cut_prompt(row, self._max_tokens) or [int(self._own.pad_token_id)] for row in encoded]


def cut_prompt(token_ids: Sequence[int], limit: int) -> Sequence[int]:
    """Truncate a prompt to `limit` tokens, half from its beginning and half from its end: instructions, which decide
    the answer's length, stand first or last (Sun et al., arXiv 1905.05583, section 5.3.1, for documents)."""
    if len(token_ids) <= limit:
        return token_ids
    head = limit // 2
    return [*token_ids[:head], *token_ids[len(token_ids) - (limit - head) :]]


def max_input_tokens(config: Any, tokenizer: Any) -> int:
    # Some position tables have rows that no token may use (RoBERTa's first two), and some models have no table. The
    # tokenizer's limit accounts for the former; it is 1e30 when unknown.
    positions = getattr(config, "max_position_embeddings", None) or tokenizer.model_max_length
    return int(min(positions, tokenizer.model_max_length))


def pad_rows(rows: Sequence[Sequence[int]], pad_token_id: int) -> "tuple[torch.Tensor, torch.Tensor]":
    """Pad token ids on the right. Returns ids and attention mask: [len(rows), longest row], int64, on the CPU."""
    import torch

    width = max(len(row) for row in rows)
    input_ids = torch.full((len(rows), width), pad_token_id)
    mask = torch.zeros((len(rows), width), dtype=torch.int64)
    for place, row in enumerate(rows):
        input_ids[place, : len(row)] = torch.tensor(row)
        mask[place, : len(row)] = 1
    return input_ids, mask
