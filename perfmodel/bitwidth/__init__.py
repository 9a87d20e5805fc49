"""Bit widths of near-data experts: loss tables, and the selector that spends a bit budget on them."""

from perfmodel.bitwidth.select import bit_budget, bits_by_rank, select_bitwidths
from perfmodel.bitwidth.table import BITS, BUNDLED_LOSSES, LossTable, losses_for

__all__ = ["BITS", "BUNDLED_LOSSES", "LossTable", "bit_budget", "bits_by_rank", "losses_for", "select_bitwidths"]
