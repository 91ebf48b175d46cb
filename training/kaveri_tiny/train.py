"""Trains `kaveri-tiny` on a CPU: owns the architecture, the curriculum, the optimizers and the checkpoints.

`python -m training.kaveri_tiny.train --minutes 60` trains for that much wall time (the schedules follow the clock, so a
busy machine makes a less trained model, never an unfinished one), and writes the model's files into `--output` at every
checkpoint. With `--resume` it goes on from the checkpoint, for instance with another number of threads.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from training.kaveri_tiny.families import FAMILIES, Sample, draw
from training.kaveri_tiny.make_tokenizer import ASSISTANT, BEGIN, CONTEXT_LENGTH, END, MODEL_FOLDER, PAD, USER

TOKENS_PER_BATCH = 4096
BATCHES_PER_STEP = 3
SAMPLES_PER_POOL = 1500
LENGTH_MULTIPLE = 16
WARMUP_STEPS = 100
DECAY_SHARE = 0.45
FIRST_LEVEL = 0.04
# Lists start longer: in short ones, guessing any word of the list is good enough for too long.
FIRST_LEVELS = {"copy": 0.2, "reverse": 0.2}
LEVEL_GROWTH = 1.3
LEARNT_BELOW = 0.15
LOSS_MEMORY = 0.9
CONVERSATION_SHARE = 0.1
RAW_SHARE = 0.35
BEGIN_SHARE = 0.15


def architecture(tokenizer: Tokenizer) -> LlamaConfig:
    """The model's shape. The large rotary base keeps half of the dimensions nearly blind to position, which is what
    finding a word far back in a long list needs."""
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(BEGIN),
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=tokenizer.token_to_id(PAD),
        attn_implementation="sdpa",
    )


@dataclass(frozen=True)
class Row:
    """A tokenized sample: for each token the weight of predicting it, zero in prompts."""

    family: str
    tokens: list[int]
    weights: list[float]


@dataclass(frozen=True)
class Batch:
    """Rows of similar length, padded on the right; `families` names the rows' families."""

    families: list[str]
    tokens: torch.Tensor
    weights: torch.Tensor


class Curriculum:
    """How difficult each family's samples may be by now, and how often it is drawn.

    A family grows longer once its recent loss is low, so each one goes as fast as it can.
    """

    def __init__(self) -> None:
        self.levels = {family: FIRST_LEVELS.get(family, FIRST_LEVEL) for family in FAMILIES}
        self.losses = dict.fromkeys(FAMILIES, 1.0)

    def observe(self, families: list[str], losses: list[float]) -> None:
        """Takes in the mean losses of one batch's rows."""
        for family in set(families):
            own = [loss for name, loss in zip(families, losses, strict=True) if name == family]
            memory = LOSS_MEMORY ** min(len(own), 10)
            self.losses[family] = memory * self.losses[family] + (1.0 - memory) * sum(own) / len(own)

    def advance(self) -> None:
        """Raises the levels of the families that have learnt theirs; called once per pool."""
        for family, loss in self.losses.items():
            if loss < LEARNT_BELOW:
                self.levels[family] = min(1.0, self.levels[family] * LEVEL_GROWTH)

    def share(self, family: str) -> float:
        """The family's weight in the draw: what is learnt already is drawn less often."""
        return FAMILIES[family][1] * min(1.0, 0.2 + self.losses[family])


class SampleSource:
    """Draws batches of rows of similar length from the training split, as difficult as the curriculum has it."""

    def __init__(self, tokenizer: Tokenizer, curriculum: Curriculum, seed: int) -> None:
        self._tokenizer = tokenizer
        self._curriculum = curriculum
        self._rng = Random(seed)

    def _sample(self, shorten: float = 1.0) -> Sample:
        family = self._rng.choices(list(FAMILIES), [self._curriculum.share(name) for name in FAMILIES])[0]
        level = self._curriculum.levels[family] * shorten
        return draw(self._rng, family, level * self._rng.choice((0.25, 0.5, 1.0)), held_out=False)

    def _pieces(self, sample: Sample) -> list[tuple[str, bool]]:
        """The texts of one row and whether each is to be learnt: a raw prompt, a chat, or a chat of several turns."""
        rng = self._rng
        begin = [(BEGIN, False)] if rng.random() < BEGIN_SHARE else []
        if rng.random() < RAW_SHARE:
            return [*begin, (sample.prompt, False), (sample.answer + END, True)]
        turns = [(sample.prompt, sample.answer)]
        if rng.random() < CONVERSATION_SHARE:
            turns.extend((more.prompt, more.answer) for more in (self._sample(0.3) for _ in range(3)))
        return begin + [
            piece
            for prompt, answer in turns
            for piece in ((f"{USER}{prompt}{END}{ASSISTANT}", False), (answer + END, True))
        ]

    def _row(self) -> Row:
        sample = self._sample()
        pieces = self._pieces(sample)
        tokens: list[int] = []
        weights: list[float] = []
        for encoding, (_, learnt) in zip(
            self._tokenizer.encode_batch([text for text, _ in pieces]), pieces, strict=True
        ):
            tokens.extend(encoding.ids)
            # Between a weight per answer and one per token: neither do one-word answers drown, nor the long ones.
            weights.extend([len(encoding.ids) ** -0.5 if learnt else 0.0] * len(encoding.ids))
        return Row(sample.family, tokens, weights)

    def pool(self) -> list[Batch]:
        """Shuffled batches of at most TOKENS_PER_BATCH tokens each."""
        rows = [row for row in (self._row() for _ in range(SAMPLES_PER_POOL)) if len(row.tokens) <= CONTEXT_LENGTH]
        rows.sort(key=lambda row: len(row.tokens))
        batches = []
        while len(rows) > 1:
            length = -(-len(rows[-1].tokens) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
            size = max(2, TOKENS_PER_BATCH // length)
            chosen, rows = rows[-size:], rows[:-size]
            tokens = torch.zeros(len(chosen), length, dtype=torch.long)
            weights = torch.zeros(len(chosen), length)
            for index, row in enumerate(chosen):
                tokens[index, : len(row.tokens)] = torch.tensor(row.tokens)
                weights[index, : len(row.tokens)] = torch.tensor(row.weights)
            batches.append(Batch([row.family for row in chosen], tokens, weights))
        self._rng.shuffle(batches)
        return batches


def learning_rate_factor(progress: float, step: int) -> float:
    """Warm-up by steps, then constant, then a straight line to zero over the last part of the time."""
    return min(1.0, (step + 1) / WARMUP_STEPS, max(0.0, (1.0 - progress) / DECAY_SHARE))


def save_model(model: LlamaForCausalLM, folder: Path) -> None:
    """Writes config, generation config and bfloat16 weights; the model itself stays in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy = copy.to(torch.bfloat16)
    config = model.config
    copy.generation_config = GenerationConfig(
        do_sample=False,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    copy.save_pretrained(folder)


def train(arguments: argparse.Namespace) -> None:
    """Trains until the minutes are over; prints a line every 20 steps."""
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    tokenizer = Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))
    model = LlamaForCausalLM(architecture(tokenizer))
    body: Callable[..., Any] = torch.compile(model.model, dynamic=True)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    rate = arguments.learning_rate
    # Muon learns to copy and to look up in a fraction of the steps that AdamW needs for it.
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    step, tokens_seen, seconds = 0, 0, 0.0
    checkpoint_path = arguments.output / "checkpoint.pt"
    curriculum = Curriculum()
    if arguments.resume:
        state: dict[str, Any] = torch.load(checkpoint_path, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step, tokens_seen, seconds = state["step"], state["tokens_seen"], state["seconds"]
        # The checkpoint may know families that were dropped since.
        for family in FAMILIES:
            curriculum.levels[family], curriculum.losses[family] = state["levels"][family], state["losses"][family]
    source = SampleSource(tokenizer, curriculum, arguments.seed + step)
    batches: list[Batch] = []
    budget = arguments.minutes * 60.0
    started = time.monotonic() - seconds
    last_saved, losses = time.monotonic(), []
    finished = False
    while not finished:
        seconds = time.monotonic() - started
        progress = min(1.0, seconds / budget)
        finished = progress >= 1.0
        factor = learning_rate_factor(progress, step)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
        weight_sum, loss_sum = 0.0, 0.0
        # A step sums over batches of different lengths: a batch of a few long rows that are learnt already must not
        # count as much as one of two hundred short rows that are not.
        for _ in range(BATCHES_PER_STEP):
            if not batches:
                curriculum.advance()
                batches = source.pool()
            batch = batches.pop()
            weights = batch.weights[:, 1:]
            learnt = weights > 0
            with torch.autocast("cpu", dtype=torch.bfloat16):
                hidden = body(input_ids=batch.tokens, use_cache=False).last_hidden_state
                logits = model.lm_head(hidden[:, :-1][learnt])
            entropy = functional.cross_entropy(logits.float(), batch.tokens[:, 1:][learnt], reduction="none")
            loss = (entropy * weights[learnt]).sum()
            torch.autograd.backward(loss)
            spread = torch.zeros_like(weights).masked_scatter(learnt, entropy.detach())
            curriculum.observe(batch.families, (spread.sum(dim=1) / learnt.sum(dim=1)).tolist())
            weight_sum += weights.sum().item()
            loss_sum += loss.item()
            tokens_seen += batch.tokens.numel()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= weight_sum
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        losses.append(loss_sum / weight_sum)
        if step % 20 == 0:
            print(
                f"step {step} tokens {tokens_seen / 1e6:.2f}M seconds {seconds:.0f} "
                f"loss {sum(losses) / len(losses):.4f} "
                f"rate factor {factor:.2f}",
                flush=True,
            )
            losses = []
        if step % 60 == 0:
            print({name: (round(curriculum.levels[name], 2), round(curriculum.losses[name], 2)) for name in FAMILIES})
        if finished or time.monotonic() - last_saved > arguments.save_every:
            last_saved = time.monotonic()
            save_model(model, arguments.output)
            state = {
                "model": model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                "step": step,
                "tokens_seen": tokens_seen,
                "seconds": seconds,
                "levels": curriculum.levels,
                "losses": curriculum.losses,
            }
            partial = checkpoint_path.with_suffix(".partial")
            torch.save(state, partial)
            partial.replace(checkpoint_path)


def main() -> None:
    """Reads the command line and trains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder for the model's files and the checkpoint")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--save-every", type=float, default=120.0, help="seconds between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
