"""What is priced, and everything that a point of it may vary: the ground of sweeps and answers."""

from perfmodel.scenario.scenario import Scenario

__all__ = ["Scenario"]
