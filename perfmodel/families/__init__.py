"""From the keys of a Hugging Face ``config.json`` to the shape of a network.

``network.py`` has the parts of a network, ``aliases.py`` the one table of key spellings, ``keys.py`` the checked access
to keys, ``attention.py`` and ``feed_forward.py`` the parts that families share, and one module per publisher the
families: for each ``model_type`` a declaration of its required and optional keys and a small reader. To add a family,
write both in the publisher's module and enter them in its ``FAMILIES``.
"""

from perfmodel.families.keys import ConfigKeys, Declared, one_line
from perfmodel.families.network import Attention, Cache, Experts, FeedForward, Shape, Tensor, Tensors, params_of
from perfmodel.families.registry import Family, Reading, Wrapper, families, language_model, read_shape

__all__ = [
    "Attention",
    "Cache",
    "ConfigKeys",
    "Declared",
    "Experts",
    "Family",
    "FeedForward",
    "Reading",
    "Shape",
    "Tensor",
    "Tensors",
    "Wrapper",
    "families",
    "language_model",
    "one_line",
    "params_of",
    "read_shape",
]
