"""One model over several ranks: layers divided among the stages of a pipeline, tensors among the ranks of a stage."""
