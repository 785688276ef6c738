"""Errors of requests and arguments."""

from __future__ import annotations

from millrace.results.errors import MAX_MESSAGE, MillraceError, one_line

MAX_FIELD = 60
"""Characters of a field's name in an error: an unknown field may have any name."""


class InvalidRequest(MillraceError, ValueError):
    """Raised for an invalid value of a field or an argument; names it and says what is valid."""

    def __init__(self, field: str, message: str) -> None:
        self.field = one_line(field, MAX_FIELD)
        self.message = one_line(message, MAX_MESSAGE - MAX_FIELD - 2)
        super().__init__(f"{self.field}: {self.message}")
        self.index: int | None = None
        """In `submit_many`: the index of the request, from 0."""
        self.job_ids: list[str] = []
        """In `submit_many`: the ids that the call has in the queue, in order. Of a list none, unless the server refused."""

    def __str__(self) -> str:
        if self.index is None:
            return super().__str__()
        num_taken = len(self.job_ids) or "no"
        return f"{super().__str__()} (requests[{self.index}]; {num_taken} jobs of this call are in the queue)"


class PayloadTooLarge(InvalidRequest):
    """Raised when a request is too large as JSON."""

    def __init__(self, num_bytes: int, max_bytes: int) -> None:
        super().__init__("body", f"has {num_bytes} bytes as JSON, at most {max_bytes} are allowed; shorten the prompt")
