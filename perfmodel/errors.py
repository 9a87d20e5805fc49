"""Every error that perfmodel raises on purpose.

All of them are ``ValueError`` and carry one readable message that says what was found, where, and what is
allowed. The command line prints that message and exits with code 2.
"""

from typing import Any


class PerfModelError(ValueError):
    """Base of all errors of this package."""


class NoAnswerError(PerfModelError):
    """A question that was understood has the answer "nowhere": no point or value is what was asked for.

    The command line prints the sentence and exits with code 1.

    details : what came closest, as plain values for JSON.
    """

    def __init__(self, message: str, details: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.details = details or {}


class SpecError(PerfModelError):
    """A hardware or system spec is missing, malformed or physically impossible."""


class ModelConfigError(PerfModelError):
    """A model's ``config.json`` cannot be read or belongs to an unsupported family."""


class TraceError(PerfModelError):
    """A routing trace or a loss table is malformed, or does not fit the model it is used with."""


class PlacementError(PerfModelError):
    """Weights do not fit where the policy puts them."""


class PolicyError(PerfModelError):
    """A policy is unknown, has a bad option, or cannot run on this system or trace."""
