"""From a model directory to modules with weights."""
