"""The ways to start ranks, notice their end, and end them."""
