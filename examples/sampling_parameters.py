"""What each sampling parameter does to the same prompt and seed. Usage: python examples/sampling_parameters.py [MODEL_DIR]

`logprobs` is in logprobs.py, `thinking_token_budget` in chat.py, `structured_outputs` in structured_output.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from millrace import LLM, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).parent / "tiny_model")
PROMPT = "A story about a fox:"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": None}  # None: as many tokens as the context holds
LONG: dict[str, Any] = {"temperature": 0, "max_tokens": 100}
RANDOM: dict[str, Any] = {"temperature": 1.5, "seed": 1, "max_tokens": 60}
PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "max_tokens": {**GREEDY, "max_tokens": 20},
    "min_tokens": {**LONG, "min_tokens": 100},
    "ignore_eos": {**LONG, "ignore_eos": True},
    "skip_special_tokens": {
        **LONG,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    },
    "presence_penalty": {**GREEDY, "presence_penalty": 2.0},
    "frequency_penalty": {**LONG, "frequency_penalty": -2.0},
    "repetition_penalty": {**GREEDY, "repetition_penalty": 2.0},
    "bad_words": {**GREEDY, "bad_words": ["snowy"]},
    "stop": {**GREEDY, "stop": "fox"},
    "stop, included": {**GREEDY, "stop": "fox", "include_stop_str_in_output": True},
    "truncate_prompt_tokens": {**GREEDY, "truncate_prompt_tokens": 1},
    "random": RANDOM,
    "seed": {**RANDOM, "seed": 2},
    "temperature": {**RANDOM, "temperature": 0.7},
    "top_k": {**RANDOM, "top_k": 3},
    "top_p": {**RANDOM, "top_p": 0.5},
    "min_p": {**RANDOM, "min_p": 0.02},
    "n": {**RANDOM, "n": 2},
}


def main() -> None:
    with LLM(MODEL) as llm:
        digits = [llm.get_tokenizer().convert_tokens_to_ids(digit) for digit in "0123456789"]
        given = {
            **PARAMETERS,
            "logit_bias": {**GREEDY, "logit_bias": {digits[9]: 12.0}},
            "allowed_token_ids": {**RANDOM, "allowed_token_ids": digits},
            "stop_token_ids": {**GREEDY, "stop_token_ids": llm.get_tokenizer()(".").input_ids},
        }
        outputs = llm.generate(
            [PROMPT] * len(given), [SamplingParams(**fields) for fields in given.values()], use_tqdm=False
        )
        bare = SamplingParams(temperature=0, detokenize=False, prompt_logprobs=0)
        (scored,) = llm.generate([PROMPT], bare, use_tqdm=False)
    for name, output in zip(given, outputs, strict=True):
        for candidate in output.outputs:
            print(f"{name:22} {candidate.text!r}")
    print(f"{'detokenize':22} {scored.outputs[0].token_ids}")
    values = [one.logprob for token in scored.prompt_logprobs or [] for one in (token or {}).values()]
    print(f"{'prompt_logprobs':22} {values}")


if __name__ == "__main__":
    main()
