"""The systems that can be compared, by name."""

import difflib

from perfmodel.errors import PolicyError
from perfmodel.hardware.base import shown
from perfmodel.policies.base import Executor, Plan, PlanInputs, Policy, When, WorkClass, footprints, parse_options
from perfmodel.policies.context_aware import ABLATIONS, ContextAware, Static
from perfmodel.policies.expert_cache import CachedByRule
from perfmodel.policies.hobbit import Hobbit
from perfmodel.policies.monde import Monde

#: Every policy by name.
POLICIES: dict[str, type[Policy]] = {kind.name: kind for kind in (ContextAware, Static, Monde, Hobbit, CachedByRule)}


def parse_policy(text: str) -> Policy:
    """Policy from ``name`` or ``name:key=value,key=value``, for example ``context-aware:mean_bits=2``.

    Raises
    ------
    PolicyError : unknown name or option, or a value out of range.
    """
    if not isinstance(text, str):
        raise PolicyError(f"policy: found {shown(text)}, allowed a text such as context-aware:mean_bits=2")
    name, _, options = text.partition(":")
    kind = POLICIES.get(name.strip())
    if kind is None:
        close = difflib.get_close_matches(name[:80], POLICIES, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise PolicyError(f"policy: found {shown(name)}, allowed {', '.join(POLICIES)}{hint}")
    return parse_options(kind, options)


__all__ = [
    "ABLATIONS",
    "POLICIES",
    "ContextAware",
    "Executor",
    "Hobbit",
    "Monde",
    "Plan",
    "PlanInputs",
    "Policy",
    "Static",
    "When",
    "WorkClass",
    "footprints",
    "parse_policy",
]
