"""Scheduling and block bookkeeping: no I/O, no torch, no clock."""
