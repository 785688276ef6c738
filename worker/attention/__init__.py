"""Attention over the paged KV pool, behind the interface that transformers' modules call."""
