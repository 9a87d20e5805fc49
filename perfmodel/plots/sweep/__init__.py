"""Figures of sweeps, one module a kind; ``figure.sweep_figure`` draws any of them by the name of its kind."""
