"""Estimate of the memory of activations on one GPU: the tensors that live at the same time, at their largest.

Engines differ in how they reuse buffers, so this is an estimate and called ``assumed`` in a report: while a layer runs,
the residual stream and its normalised copy are alive, and either every output of the mixer's projections, or every
output of the feed-forward networks with the gathered rows of the experts. After the last layer the logits of the last
token of each sequence are alive, in single precision.
"""

import math

from perfmodel.families import FeedForward, Tensors
from perfmodel.memory.parallel import Parallel
from perfmodel.memory.ranks import Stage
from perfmodel.model import MoEModel

#: Tokens of a prefill that engines run at once [token]; the micro-batch of llama.cpp. Engines that schedule chunks of
#: several thousand tokens need more.
ACTIVATION_TOKENS = 512
#: What the driver's context (about 0.5 GB), captured graphs and libraries' workspaces take of a GPU [byte].
RESERVE_BYTES = 0.8e9
_LOGIT_BYTES = 4


def _outputs(tensors: Tensors) -> int:
    """Numbers that the matrices of some tensors make of one token [1]."""
    return sum(tensor.shape[0] for tensor in tensors if tensor.is_matrix)


def _feed_forward(kind: FeedForward, hidden: int, parallel: Parallel) -> float:
    """Numbers that live while a feed-forward layer works on one token of each replica [1]."""
    live = (_outputs(kind.dense) + _outputs(kind.shared)) / parallel.tensor + _outputs(kind.router)
    if kind.experts is not None:
        picks = parallel.replicas * kind.experts.top_k / parallel.expert
        live += picks * (hidden + _outputs(kind.experts.tensors) / parallel.expert_parts)
    return live


def activation_parts(
    model: MoEModel, stage: Stage, parallel: Parallel, tokens: int, sequences: int
) -> dict[str, float]:
    """Live tensors by what they are [byte].

    tokens : tokens that one replica works on at once. sequences : sequences of one replica, each with its logits.
    Picks are taken to spread evenly over expert ranks.
    """
    width = 4 if model.compute == "float32" else 2
    mixer = max(_outputs(kind.tensors) for kind in stage.attention) / parallel.tensor
    network = max(_feed_forward(kind, model.hidden_size, parallel) for kind in stage.feed_forward)
    rows = max(tokens, sequences)
    parts = {
        "residual stream": 2.0 * rows * model.hidden_size * width,
        "layer workspace": math.ceil(rows * max(mixer, network)) * float(width),
    }
    if stage.has_head:
        parts["logits"] = float(sequences * model.vocab_size * _LOGIT_BYTES)
    return parts
