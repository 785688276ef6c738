"""How many prompt tokens a step may have beside the decode rows of jobs that somebody reads."""

from __future__ import annotations

_SMOOTHING = 0.2
_MIN_TOKENS = 32
"""Prompts go on, however slow the device is."""
_MIN_MEASURED = 16
"""Steps with fewer prompt tokens say little about the time that a prompt token takes."""


class PrefillPace:
    """Owns the measured speed of the steps."""

    def __init__(self, target_s: float) -> None:
        """`target_s`: how long a step may take while somebody reads the output of its decode rows."""
        self._target_s = target_s
        self._decode_s = 0.0
        """Duration of a step that has decode rows only."""
        self.token_s = 0.0
        """What a prompt token adds to a step. 0 before the first measurement."""

    def measure(self, num_decodes: int, num_prompt_tokens: int, took_s: float) -> None:
        """Record the duration of a step."""
        if num_prompt_tokens == 0:
            self._decode_s = _smoothed(self._decode_s, took_s)
        elif num_prompt_tokens >= _MIN_MEASURED:
            decode_s = self._decode_s if num_decodes else 0.0
            self.token_s = _smoothed(self.token_s, max(0.0, took_s - decode_s) / num_prompt_tokens)

    def limit(self, num_tokens: int) -> int:
        """Return how many of `num_tokens` prompt tokens the next step may have."""
        if self.token_s == 0.0:
            return num_tokens
        return min(num_tokens, max(_MIN_TOKENS, int((self._target_s - self._decode_s) / self.token_s)))


def _smoothed(mean: float, value: float) -> float:
    return value if mean == 0.0 else mean + _SMOOTHING * (value - mean)
