"""The shape of a Mixture-of-Experts network, read from a Hugging Face ``config.json``."""

from perfmodel.families import Attention, Cache, Experts, FeedForward, Shape, Tensor, families
from perfmodel.model.cache import LAYOUTS
from perfmodel.model.moe_model import MoEModel
from perfmodel.model.sources import bundled_models

__all__ = [
    "LAYOUTS",
    "Attention",
    "Cache",
    "Experts",
    "FeedForward",
    "MoEModel",
    "Shape",
    "Tensor",
    "bundled_models",
    "supported_families",
]


def supported_families() -> tuple[str, ...]:
    """The ``model_type`` values that `MoEModel.from_config` reads."""
    return tuple(sorted(families()))
