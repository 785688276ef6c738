"""What crosses between the engine and its ranks: messages, the ZeroMQ channel, calls, the handshake of a start."""
