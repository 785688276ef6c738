"""A forward pass of our own over the weights of models whose structure is known."""
