"""Attention over the paged KV pool, called through transformers' attention interface."""
