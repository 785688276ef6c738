"""What a client can do wrong."""

from __future__ import annotations

from millrace.results.errors import MAX_MESSAGE, MillraceError, one_line

MAX_FIELD = 60
"""Characters of a field's name in an error: a user may have made it up."""


class InvalidRequest(MillraceError, ValueError):
    """Raised when a field of a request has a value that it cannot have; names the field and what it may be."""

    def __init__(self, field: str, message: str) -> None:
        self.field = one_line(field, MAX_FIELD)
        self.message = one_line(message, MAX_MESSAGE - MAX_FIELD - 2)
        super().__init__(f"{self.field}: {self.message}")
        self.index: int | None = None
        """In `submit_many`: which of the requests it is, from 0."""
        self.job_ids: list[str] = []
        """In `submit_many`: what that call has in the queue, in order; of a list nothing, unless the server refused."""

    def __str__(self) -> str:
        if self.index is None:
            return super().__str__()
        num_taken = len(self.job_ids) or "no"
        return f"{super().__str__()} (requests[{self.index}]; {num_taken} jobs of this call are in the queue)"


class PayloadTooLarge(InvalidRequest):
    """Raised when a request is longer, as JSON, than the queue takes."""

    def __init__(self, num_bytes: int, max_bytes: int) -> None:
        super().__init__("body", f"{num_bytes} bytes as JSON, at most {max_bytes} are taken; shorten the prompt")
