"""How executors start ranks, notice their end, and end them."""
