"""Linear layers of a model: on a CPU with weights that are packed once, on a GPU in torch and Triton."""
