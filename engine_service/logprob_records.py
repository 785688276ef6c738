"""Reads the log-probability records of the workers; see `record_bytes`."""

from __future__ import annotations

import struct
from collections.abc import Sequence as SequenceOf

from millrace.engine_service.text import Tokenizer
from millrace.results.logprobs import Entry

_TOKEN = struct.Struct("<fI")
_ALTERNATIVE = struct.Struct("<If")
MAX_BEFORE = 4
"""A character has at most this many tokens before its last one."""


def read_record(record: bytes, before: SequenceOf[int], token_id: int, tokenizer: Tokenizer | None) -> list[Entry]:
    """Return the entries of a token that follows `before`, at most MAX_BEFORE tokens. Without a tokenizer: no texts."""
    value, rank = _TOKEN.unpack_from(record)
    found = [(token_id, value, rank)]
    for place, (other_id, value) in enumerate(_ALTERNATIVE.iter_unpack(record[_TOKEN.size :]), start=1):
        if other_id != token_id:
            found.append((other_id, value, place))
    if tokenizer is None:
        return [(*each, None) for each in found]
    texts = tokenizer.texts_of([each[0] for each in found], before)
    return [(*each, text) for each, text in zip(found, texts, strict=True)]
