"""The systems that can be compared, by name."""

import difflib

from perfmodel.errors import PolicyError
from perfmodel.hardware.base import shown
from perfmodel.policies.adaptive import Adaptive
from perfmodel.policies.base import Executor, Plan, PlanInputs, Policy, When, WorkClass, footprints, parse_options
from perfmodel.policies.context_aware import ABLATIONS, ContextAware, Static
from perfmodel.policies.daop import Daop
from perfmodel.policies.expert_cache import CachedByRule
from perfmodel.policies.fiddler import Fiddler
from perfmodel.policies.fluxmoe import FluxMoE
from perfmodel.policies.hobbit import Hobbit
from perfmodel.policies.hybrimoe import HybriMoE
from perfmodel.policies.ktransformers import KTransformers
from perfmodel.policies.llama_cpp import LlamaCpp
from perfmodel.policies.moe_infinity import MoEInfinity
from perfmodel.policies.moe_lightning import MoELens, MoELightning
from perfmodel.policies.moe_offloading import MoEOffloading
from perfmodel.policies.monde import Monde
from perfmodel.policies.pimoe import Pimoe
from perfmodel.policies.pmpd import Pmpd
from perfmodel.policies.pregated import PreGated
from perfmodel.policies.promoe import ProMoE
from perfmodel.policies.resident import AllCpu, AllResident

#: Every policy by name.
POLICIES: dict[str, type[Policy]] = {
    kind.name: kind
    for kind in (
        ContextAware,
        Static,
        Monde,
        Hobbit,
        CachedByRule,
        Adaptive,
        Pimoe,
        Pmpd,
        MoEOffloading,
        MoEInfinity,
        PreGated,
        ProMoE,
        MoELightning,
        MoELens,
        FluxMoE,
        AllResident,
        AllCpu,
        LlamaCpp,
        Fiddler,
        KTransformers,
        HybriMoE,
        Daop,
    )
}


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
    "Adaptive",
    "AllCpu",
    "AllResident",
    "ContextAware",
    "Daop",
    "Executor",
    "Fiddler",
    "Hobbit",
    "HybriMoE",
    "KTransformers",
    "LlamaCpp",
    "MoEInfinity",
    "MoEOffloading",
    "Monde",
    "Plan",
    "PlanInputs",
    "Policy",
    "PreGated",
    "ProMoE",
    "Static",
    "When",
    "WorkClass",
    "footprints",
    "parse_policy",
]
