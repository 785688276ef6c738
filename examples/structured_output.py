"""The same questions with several forms of the answer. Usage: python examples/structured_output.py [MODEL_DIR]"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from millrace import LLM, OutputNotParsed, SamplingParams, StructuredOutputs

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "snow", "code"]}, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
FORMS: dict[str, dict[str, Any]] = {
    "json": {"json": PERSON},
    "regex": {"regex": r"[0-9]{1,3} (km|miles)"},
    "choice": {"choice": ["good", "bad"]},
    "grammar": {"grammar": 'start: NUMBER (" + " NUMBER){1,3}\nNUMBER: /[0-9]{1,2}/'},
}


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parent / "tiny_model"
    requests = [SamplingParams(max_tokens=60, structured_outputs=StructuredOutputs(**form)) for form in FORMS.values()]
    with LLM(model, seed=0, max_model_len=512) as llm:
        outputs = [
            request.outputs[0] for request in llm.generate(["The answer:"] * len(FORMS), requests, use_tqdm=False)
        ]
    for name, output in zip(FORMS, outputs, strict=True):
        print(f"{name:10}{output.text!r}")
    try:
        print("parsed    ", outputs[0].parsed())
    except OutputNotParsed as error:  # max_tokens has cut it
        print("cut       ", error)


if __name__ == "__main__":
    main()
