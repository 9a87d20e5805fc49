"""Measuring a machine: small experiments whose times become the constants of a system.

`measure` runs them and returns a `Measurement`, which writes itself as an overlay; `check_forward` is the validation
against another program. What is measured and how is described in docs/measuring.md.
"""

from perfmodel.measure.check import CheckRow, check_forward, median_error
from perfmodel.measure.measurement import BASE, SECONDS, Measurement, measure

__all__ = ["BASE", "SECONDS", "CheckRow", "Measurement", "check_forward", "measure", "median_error"]
