"""Loading a model directory into modules with weights."""
