"""Other ways in: each turns what it takes into native jobs."""
