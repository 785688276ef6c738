"""The engines that the throughput benchmarks compare: one module each, run in a process of the engine's own environment."""
