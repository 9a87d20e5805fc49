"""Builders of state-space layers: Mamba (arXiv:2312.00752) and Mamba-2 (arXiv:2405.21060)."""

from perfmodel.families.attention import linear
from perfmodel.families.network import Attention, Tensor, Tensors


def _convolution(prefix: str, channels: int, kernel: int, bias: bool) -> Tensors:
    """A short convolution, one filter for each channel."""
    weight = Tensor(f"{prefix}.conv1d", (channels, 1, kernel))
    return (weight, Tensor(f"{prefix}.conv1d.bias", (channels,))) if bias else (weight,)


def mamba_1(
    prefix: str,
    hidden: int,
    width: int,
    layers: tuple[int, ...],
    *,
    state: int,
    rank: int,
    kernel: int,
    bias: bool,
    convolution_bias: bool,
) -> Attention:
    """Mamba with norms of what selects, as Jamba has it (arXiv:2403.19887): a state of ``width * state`` numbers.

    The convolution remembers the ``kernel - 1`` inputs before the current one.
    """
    tensors = (
        *linear(f"{prefix}.in_proj", hidden, 2 * width, bias=bias),
        *_convolution(prefix, width, kernel, convolution_bias),
        *linear(f"{prefix}.x_proj", width, rank + 2 * state),
        Tensor(f"{prefix}.dt_layernorm", (rank,)),
        Tensor(f"{prefix}.b_layernorm", (state,)),
        Tensor(f"{prefix}.c_layernorm", (state,)),
        *linear(f"{prefix}.dt_proj", rank, width, bias=True),
        Tensor(f"{prefix}.A_log", (width * state,)),  # a table, and no linear map
        Tensor(f"{prefix}.D", (width,)),
        *linear(f"{prefix}.out_proj", width, hidden, bias=bias),
    )
    return Attention(
        name="mamba",
        layers=layers,
        tensors=tensors,
        norm_params=hidden,
        recurrent_elements=width * state,
        convolution_elements=width * (kernel - 1),
    )


def mamba_2(
    prefix: str,
    hidden: int,
    layers: tuple[int, ...],
    *,
    heads: int,
    head_dim: int,
    groups: int,
    state: int,
    kernel: int,
    bias: bool,
    convolution_bias: bool,
) -> Attention:
    """Mamba-2: a state of ``head_dim * state`` numbers for each head; groups of heads share what reads and writes it.

    The input projection makes the gate, the input of the convolution and the step sizes of the heads. The convolution
    remembers the ``kernel - 1`` inputs before the current one.
    """
    width = heads * head_dim
    channels = width + 2 * groups * state
    tensors = (
        *linear(f"{prefix}.in_proj", hidden, width + channels + heads, bias=bias),
        *_convolution(prefix, channels, kernel, convolution_bias),
        Tensor(f"{prefix}.dt_bias", (heads,)),
        Tensor(f"{prefix}.A_log", (heads,)),
        Tensor(f"{prefix}.D", (heads,)),
        Tensor(f"{prefix}.norm", (width,)),
        *linear(f"{prefix}.out_proj", width, hidden, bias=bias),
    )
    return Attention(
        name="mamba",
        layers=layers,
        tensors=tensors,
        norm_params=hidden,
        recurrent_elements=width * state,
        convolution_elements=channels * (kernel - 1),
    )
