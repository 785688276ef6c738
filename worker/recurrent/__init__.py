"""Recurrent layers: linear attention, state space models and short convolutions."""
