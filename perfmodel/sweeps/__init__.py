"""Sweeps: many points of one scenario, as labelled arrays."""
