"""Trains the tiny model from generated text, and measures it on sums it has never seen. Its README has the figures.

Run it as `python examples/tiny_model/train.py [--out DIR]`. The model exists so that the serving stack can be tested
on a laptop with answers that are right or wrong. A fixed seed makes runs alike; another processor or torch version may
still round differently.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import corpus
import torch
from evaluate import held_out_accuracy, load
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED = 20
NUM_STEPS = 2200
NUM_WARMUP_STEPS = 100
PEAK_LEARNING_RATE = 3e-3
WEIGHT_DECAY = 0.05
TOKENS_PER_STEP = 4096
PROMPT_LOSS_WEIGHT = 0.1  # operands are random: nothing to learn there beyond the form
# Most rows are short and fast; the long ones teach the positions which a chat or a long count reaches.
ROW_LENGTHS, ROW_LENGTH_SHARES = (128, 256, 512, 1024), (0.55, 0.30, 0.10, 0.05)

VOCAB_SIZE = 512
MAX_POSITIONS = 1024
NUM_TOKENIZER_DOCUMENTS = 20_000
# A space joins the word that follows it but never a digit, and each digit stands alone: the model then sees "7" as the
# same token wherever it stands, and a prompt may end with or without a space.
WORD_PATTERN = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def main() -> None:
    out = parse_arguments().out
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    started = time.monotonic()
    train(model, tokenizer)
    train_s = time.monotonic() - started
    save(model, tokenizer, out)
    accuracy_by_form = held_out_accuracy(*load(out))  # of the files, not of what is in memory
    print(json.dumps({"train_s": round(train_s), "held_out_accuracy": accuracy_by_form}, indent=2))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the tiny model from generated text.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for model and tokenizer")
    return parser.parse_args()


# --- tokenizer and model ---


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE over all 256 bytes: every text can be encoded, and the model can produce any bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=list(corpus.SPECIAL_TOKENS), show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    sample = islice(corpus.documents(SEED), NUM_TOKENIZER_DOCUMENTS)
    tokenizer.train_from_iterator((document.prompt + document.answer for document in sample), trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, "the sample text is too small for this vocabulary"
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=corpus.END, pad_token=corpus.PAD,
        additional_special_tokens=list(corpus.ROLE_MARKERS.values()), chat_template=corpus.CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Heads, KV heads, intermediate size and vocabulary are even, so that two ranks can share the model."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=MAX_POSITIONS, initializer_range=0.04,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, dtype="float32",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


# --- training; B rows, T positions in a row ---


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    optimizer = build_optimizer(model)
    model.train()
    for step, (tokens, weights) in enumerate(islice(training_batches(tokenizer), NUM_STEPS)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        loss = weighted_loss(model, tokens, weights)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step:5d}  loss {loss.item():.4f}", flush=True)


def build_optimizer(model: LlamaForCausalLM) -> torch.optim.AdamW:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    scales = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": scales, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)


def learning_rate(step: int) -> float:
    """Linear warm-up, then half a cosine down to zero."""
    if step < NUM_WARMUP_STEPS:
        return PEAK_LEARNING_RATE * (step + 1) / NUM_WARMUP_STEPS
    progress = (step - NUM_WARMUP_STEPS) / (NUM_STEPS - NUM_WARMUP_STEPS)
    return PEAK_LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * progress))


def weighted_loss(model: LlamaForCausalLM, tokens: Tensor, weights: Tensor) -> Tensor:
    """Mean cross-entropy of each next token, weighted; `tokens` and `weights` are [B, T + 1]."""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits  # [B, T, VOCAB_SIZE]
    losses = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")  # [B * T]
    target_weights = weights[:, 1:].flatten()
    return (losses * target_weights).sum() / target_weights.sum()


def training_batches(tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[Tensor, Tensor]]:
    rng = random.Random(SEED)
    encoded = encoded_documents(tokenizer)
    while True:
        (row_length,) = rng.choices(ROW_LENGTHS, ROW_LENGTH_SHARES)
        rows = [packed_row(encoded, row_length + 1) for _ in range(TOKENS_PER_STEP // row_length)]
        yield torch.tensor([tokens for tokens, _ in rows]), torch.tensor([weights for _, weights in rows])


def packed_row(encoded: Iterator[tuple[list[int], list[float]]], length: int) -> tuple[list[int], list[float]]:
    """Whole documents from position 0 on, one after the other; the last one is cut at `length`."""
    tokens: list[int] = []
    weights: list[float] = []
    while len(tokens) < length:
        document_tokens, document_weights = next(encoded)
        tokens += document_tokens
        weights += document_weights
    return tokens[:length], weights[:length]


def encoded_documents(tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[list[int], list[float]]]:
    """Each document's token ids, EOS included, and the weight of each token in the loss."""
    # Prompt and answer always meet at a boundary of WORD_PATTERN, so encoding them apart equals encoding them joined.
    stream = corpus.documents(SEED)
    while chunk := list(islice(stream, 2048)):
        prompts = tokenizer([document.prompt for document in chunk])["input_ids"]
        answers = tokenizer([document.answer + corpus.END for document in chunk])["input_ids"]
        for prompt, answer in zip(prompts, answers, strict=True):
            yield prompt + answer, [PROMPT_LOSS_WEIGHT] * len(prompt) + [1.0] * len(answer)


# --- artefacts ---


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # it is written for its owner only
    tokenizer.save_pretrained(out)
    # transformers 5 writes two entries which 4 cannot read; these spellings are read by both.
    path = out / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    path.write_text(json.dumps(settings, indent=2) + "\n")


if __name__ == "__main__":
    main()
