"""Bit widths of near-data experts: loss tables, and the selector that spends a bit budget on them."""

from perfmodel.bitwidth.budget import BUDGETS, Budget
from perfmodel.bitwidth.front import BitwidthFront, bitwidth_front
from perfmodel.bitwidth.objective import OBJECTIVES, Objective, assigned_loss, objective_weights
from perfmodel.bitwidth.of_model import BUNDLED_LOSSES, losses_for
from perfmodel.bitwidth.problem import SCOPES, Scope
from perfmodel.bitwidth.select import optimal_bitwidths, select_bitwidths
from perfmodel.bitwidth.table import BITS, LossTable, at_width

__all__ = [
    "BITS",
    "BUDGETS",
    "BUNDLED_LOSSES",
    "OBJECTIVES",
    "SCOPES",
    "BitwidthFront",
    "Budget",
    "LossTable",
    "Objective",
    "Scope",
    "assigned_loss",
    "at_width",
    "bitwidth_front",
    "losses_for",
    "objective_weights",
    "optimal_bitwidths",
    "select_bitwidths",
]
