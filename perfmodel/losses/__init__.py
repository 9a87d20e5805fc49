"""Loss tables from real weights: built, shown and compared."""

from perfmodel.losses.build import build_losses
from perfmodel.losses.calibration import Calibration
from perfmodel.losses.checkpoint import Checkpoint

__all__ = ["Calibration", "Checkpoint", "build_losses"]
