"""What some sampling parameters do to the same prompt and seed. Usage: python examples/sampling_parameters.py [MODEL_DIR]"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from millrace import LLM, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).parent / "tiny_model")
PROMPT = "A story about a fox:"
PARAMETERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": -2.0},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "bad_words": {"bad_words": ["snowy"]},
    "stop, included": {"stop": "fox", "include_stop_str_in_output": True},
}


def main() -> None:
    with LLM(MODEL) as llm:
        digits = [llm.get_tokenizer().convert_tokens_to_ids(digit) for digit in "0123456789"]
        given = {
            **PARAMETERS,
            "logit_bias": {"logit_bias": {digits[9]: 12.0}},
            "allowed_token_ids": {"allowed_token_ids": digits},
        }
        params = [SamplingParams(temperature=0, max_tokens=60, **fields) for fields in given.values()]
        outputs = llm.generate([PROMPT] * len(given), params, use_tqdm=False)
    for name, output in zip(given, outputs, strict=True):
        print(f"{name:20} {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
