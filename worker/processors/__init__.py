"""Logits processors: what a request changes in the logits before its next token is drawn."""
