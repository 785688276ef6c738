"""The bookkeeping of generation: no I/O, no torch, no clock."""
