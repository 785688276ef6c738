"""Runs step plans on workers: the contract, and the ways to fulfil it."""
