"""What crosses between the engine and its ranks: messages, the ZeroMQ channel, calls."""
