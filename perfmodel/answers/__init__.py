"""Answers about a sweep or a scenario: the best points, what matters, where one overtakes another, what it takes,
how many bits every sequence can afford, and which policy is the fastest.

Every answer is priced by the model itself; nothing is interpolated.
"""

from perfmodel.answers.choice import best
from perfmodel.answers.control import Tuning, tune
from perfmodel.answers.crossing import break_even
from perfmodel.answers.dominance import pareto
from perfmodel.answers.inverse import Crossing, Solution, solve
from perfmodel.answers.one_at_a_time import tornado
from perfmodel.answers.ranking import Ranked, Ranking, Refused, rank
from perfmodel.answers.variance import sobol_indices

__all__ = [
    "Crossing",
    "Ranked",
    "Ranking",
    "Refused",
    "Solution",
    "Tuning",
    "best",
    "break_even",
    "pareto",
    "rank",
    "sobol_indices",
    "solve",
    "tornado",
    "tune",
]
