"""A Transformers model and its Mixture-of-Experts blocks."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfmodel.errors import ModelConfigError, PerfModelError
from perfmodel.losses.record.libraries import import_torch, import_transformers, quiet
from perfmodel.routing.npz import one_line

#: Number formats that a model may be run in.
DTYPES = ("float32", "bfloat16", "float16")
#: Nothing from elsewhere, and no code that comes with a checkpoint.
_LOCAL = {"local_files_only": True, "trust_remote_code": False}


@dataclass(frozen=True)
class MoEBlock:
    """The experts of one layer.

    layer : index of the layer in the model
    experts : the module that is called with rows, expert ids and weights, and holds ``gate_up_proj``
        [experts, 2 * inner, hidden] and ``down_proj`` [experts, hidden, inner]
    """

    layer: int
    experts: Any


@dataclass(frozen=True)
class Outline:
    """What a checkpoint holds, known before its weights are read.

    family : its ``model_type``
    layers : indices of the layers with experts
    num_experts : experts of one of them
    hidden_size : of a row
    vocab_size : token ids lie below
    positions : tokens that the model reads at once, or None where its config does not say
    """

    family: str
    layers: tuple[int, ...]
    num_experts: int
    hidden_size: int
    vocab_size: int
    positions: int | None


def outline(folder: str | Path) -> Outline:
    """The outline of a checkpoint. Raises :class:`ModelConfigError` as `load_model` and `moe_blocks` do."""
    transformers, torch = import_transformers(), import_torch()
    with _refused(folder), quiet(transformers):
        config = transformers.AutoConfig.from_pretrained(str(folder), **_LOCAL)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    blocks = moe_blocks(model)
    text = config.get_text_config()
    num_experts, _, hidden_size = blocks[0].experts.gate_up_proj.shape
    return Outline(
        family=str(config.model_type),
        layers=tuple(block.layer for block in blocks),
        num_experts=int(num_experts),
        hidden_size=int(hidden_size),
        vocab_size=int(text.vocab_size),
        positions=getattr(text, "max_position_embeddings", None),
    )


def load_model(folder: str | Path, dtype: str = "float32") -> Any:
    """The causal language model in a folder, on the CPU, ready to predict.

    Only safetensors weights and code of the Transformers library itself are used, and nothing is looked up
    elsewhere. Raises :class:`ModelConfigError` for a folder that does not hold one whole model.
    """
    if dtype not in DTYPES:
        raise PerfModelError(f"dtype: found {one_line(dtype)}, allowed: {', '.join(DTYPES)}")
    transformers, torch = import_transformers(), import_torch()
    with _refused(folder), quiet(transformers):
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder),
            **_LOCAL,
            dtype=getattr(torch, dtype),
            experts_implementation="eager",  # one expert at a time: the same sums on every machine
            use_safetensors=True,
            output_loading_info=True,
        )
    # Transformers fills what is missing with random numbers.
    for kind in ("missing", "mismatched"):
        found = sorted(str(key) for key in loading[f"{kind}_keys"])
        if found:
            raise ModelConfigError(f"{one_line(folder)}: {len(found)} weights are {kind}, such as {one_line(found[0])}")
    return model.eval().requires_grad_(False)


@contextlib.contextmanager
def _refused(folder: str | Path) -> Iterator[None]:
    """Whatever goes wrong with the files of a checkpoint inside the block becomes one error."""
    name = one_line(folder)
    if not (Path(folder) / "config.json").is_file():
        raise ModelConfigError(f"{name}: no config.json there; expected the folder of a checkpoint")
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # a damaged file may raise anything in there
        raise ModelConfigError(f"{name}: cannot be loaded as a language model ({one_line(error)})") from error


def moe_blocks(model: Any) -> tuple[MoEBlock, ...]:
    """The blocks of a model in the order of its layers.

    Understood are experts that hold all their weights in two stacked matrices, gate and up in the first, and
    are called with rows, ids and weights: Mixtral, Qwen-MoE, OLMoE, DeepSeek and others since Transformers 5.
    Raises :class:`ModelConfigError`, with the family's name, for any other model.
    """
    family = str(getattr(model.config, "model_type", type(model).__name__))
    hidden = model.config.get_text_config().hidden_size
    blocks = []
    for name, module in model.named_modules():
        parts = name.split(".")
        if parts[-1] != "experts":
            continue
        layers = [int(part) for part in parts if part.isdecimal()]
        why = _not_understood(module, hidden) if len(layers) == 1 else "its layers are not numbered once"
        if why:
            raise ModelConfigError(f"model family {family}: the experts at {name} are not understood ({why})")
        blocks.append(MoEBlock(layers[0], module))
    if not blocks:
        raise ModelConfigError(f"model family {family}: no experts were found in it; expected a Mixture-of-Experts")
    shapes = {tuple(block.experts.gate_up_proj.shape) for block in blocks}
    if len(shapes) != 1:
        raise ModelConfigError(f"model family {family}: its layers have experts of different shapes, {sorted(shapes)}")
    return tuple(blocks)


def _not_understood(experts: Any, hidden: int) -> str:
    names = {name for name, _ in experts.named_parameters()}
    if names != {"gate_up_proj", "down_proj"}:
        return f"weights {', '.join(sorted(names)[:4])}; expected gate_up_proj and down_proj"
    first, second = tuple(experts.gate_up_proj.shape), tuple(experts.down_proj.shape)
    if len(first) != 3 or first[1] % 2 or first[2] != hidden or second != (first[0], hidden, first[1] // 2):
        return f"gate_up_proj {first} and down_proj {second}; expected [E, 2 d, {hidden}] and [E, {hidden}, d]"
    if getattr(experts, "is_transposed", False) or not getattr(experts, "is_concatenated", True):
        return "gate and up are transposed or interleaved"
    if not getattr(experts, "has_gate", True):
        return "they have no gate"
    return ""
