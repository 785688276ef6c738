"""Measures the saved model as a user would load it: greedy decoding in float32, answers compared as text.

Run it as `python examples/tiny_model/evaluate.py [DIR]`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import corpus
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

BATCH_SIZE = 256
MAX_ANSWER_TOKENS = 16  # "99 + 99 = 198" is 12 tokens long

Prompted = tuple[str, str]  # prompt, expected answer


def load(directory: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()
    return model, PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)


def held_out_accuracy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> dict[str, float]:
    """Share of the held-out sums answered exactly, for each form of the question."""
    return {
        form: accuracy(model, tokenizer, [ask(a, b) for a, b in corpus.held_out_sums()])
        for form, ask in QUESTION_FORMS.items()
    }


def accuracy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, cases: Sequence[Prompted]) -> float:
    num_right = 0
    for batch in batches(cases):
        answers = greedy_answers(model, tokenizer, [prompt for prompt, _ in batch])
        num_right += sum(answer == expected for answer, (_, expected) in zip(answers, batch, strict=True))
    return num_right / len(cases)


def batches(cases: Sequence[Prompted]) -> Iterator[list[Prompted]]:
    remaining = iter(cases)
    while batch := list(islice(remaining, BATCH_SIZE)):
        yield batch


@torch.inference_mode()
def greedy_answers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str]) -> list[str]:
    """What the model adds to each prompt, up to and without EOS."""
    inputs = tokenizer(list(prompts), return_tensors="pt", padding=True, padding_side="left")
    output = model.generate(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"],
        do_sample=False, max_new_tokens=MAX_ANSWER_TOKENS,
    )  # fmt: skip
    return tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def plain_sum(a: int, b: int) -> Prompted:
    return corpus.sum_prompt(a, b), corpus.sum_answer(a, b)


def chat_sum(a: int, b: int) -> Prompted:
    return chat_prompt(corpus.sum_prompt(a, b)), str(a + b)


def chat_question(a: int, b: int) -> Prompted:
    return chat_prompt(f"What is {a} + {b}?"), f"{a} + {b} = {a + b}"


def chat_prompt(question: str) -> str:
    return corpus.render_chat([{"role": "user", "content": question}], add_generation_prompt=True)


QUESTION_FORMS: dict[str, Callable[[int, int], Prompted]] = {
    "`3 + 4 =`": plain_sum,
    "chat, `3 + 4 =`": chat_sum,
    "chat, `What is 3 + 4?`": chat_question,
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, nargs="?", default=Path(__file__).parent, help="of a model")
    for form, share in held_out_accuracy(*load(parser.parse_args().directory)).items():
        print(f"{form:<28} {share:7.2%}")
