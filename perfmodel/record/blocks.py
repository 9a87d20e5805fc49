"""A Transformers model and its Mixture-of-Experts blocks."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfmodel.errors import ModelConfigError
from perfmodel.record.libraries import import_torch, import_transformers, quiet
from perfmodel.record.options import check_dtype
from perfmodel.routing.npz import one_line

#: Nothing from elsewhere, and no code that comes with a checkpoint.
_LOCAL = {"local_files_only": True, "trust_remote_code": False}


@dataclass(frozen=True)
class MoEBlock:
    """The experts of one layer.

    layer : index of the layer in the model
    experts : the module that is called with rows, expert ids and weights
    num_experts : experts that it holds
    """

    layer: int
    experts: Any
    num_experts: int


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


def outline(folder: str | Path, find: Callable[[Any], tuple[MoEBlock, ...]] | None = None) -> Outline:
    """The outline of a checkpoint.

    find : what looks for the blocks, `moe_blocks` where None, or `expert_blocks`

    Raises :class:`ModelConfigError` as `load_model` and ``find`` do.
    """
    transformers, torch = import_transformers(), import_torch()
    with _refused(folder), quiet(transformers):
        config = transformers.AutoConfig.from_pretrained(str(folder), **_LOCAL)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    blocks = (find or moe_blocks)(model)
    text = config.get_text_config()
    return Outline(
        family=str(config.model_type),
        layers=tuple(block.layer for block in blocks),
        num_experts=blocks[0].num_experts,
        hidden_size=int(text.hidden_size),
        vocab_size=int(text.vocab_size),
        positions=getattr(text, "max_position_embeddings", None),
    )


def load_model(folder: str | Path, dtype: str = "float32") -> Any:
    """The causal language model in a folder, on the CPU, ready to predict.

    Only safetensors weights and code of the Transformers library itself are used, and nothing is looked up
    elsewhere. Raises :class:`ModelConfigError` for a folder that does not hold one whole model.
    """
    check_dtype(dtype)
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


def expert_blocks(model: Any) -> tuple[MoEBlock, ...]:
    """The blocks of a model in the order of its layers: the module called ``experts`` of each.

    Raises :class:`ModelConfigError`, with the family's name, where there is none, and where layers are not numbered
    once or differ in their number of experts.
    """
    family = family_of(model)
    blocks = []
    for name, module in model.named_modules():
        parts = name.split(".")
        if parts[-1] != "experts":
            continue
        layers = [int(part) for part in parts if part.isdecimal()]
        if len(layers) != 1:
            raise _strange(family, name, "its layers are not numbered once")
        blocks.append(MoEBlock(layers[0], module, _count(module, family, name)))
    if not blocks:
        raise ModelConfigError(f"model family {family}: no experts were found in it; expected a Mixture-of-Experts")
    counts = sorted({block.num_experts for block in blocks})
    if len(counts) != 1:
        raise ModelConfigError(f"model family {family}: its layers have different numbers of experts, {counts}")
    return tuple(blocks)


def moe_blocks(model: Any) -> tuple[MoEBlock, ...]:
    """The blocks of a model whose experts hold all their weights in two stacked matrices.

    Understood are ``gate_up_proj`` [experts, 2 * inner, hidden], gate first, and ``down_proj`` [experts, hidden,
    inner]: Mixtral, Qwen-MoE, OLMoE, DeepSeek and others since Transformers 5. Raises :class:`ModelConfigError`, with
    the family's name, for any other model.
    """
    family, blocks = family_of(model), expert_blocks(model)
    hidden = model.config.get_text_config().hidden_size
    names = {module: name for name, module in model.named_modules()}
    for block in blocks:
        if why := _not_understood(block.experts, hidden):
            raise _strange(family, names[block.experts], why)
    shapes = {tuple(block.experts.gate_up_proj.shape) for block in blocks}
    if len(shapes) != 1:
        raise ModelConfigError(f"model family {family}: its layers have experts of different shapes, {sorted(shapes)}")
    return blocks


def family_of(model: Any) -> str:
    """The ``model_type`` of a model's config."""
    return str(getattr(model.config, "model_type", type(model).__name__))


def _strange(family: str, name: str, why: str) -> ModelConfigError:
    return ModelConfigError(f"model family {family}: the experts at {name} are not understood ({why})")


def _count(experts: Any, family: str, name: str) -> int:
    """Experts of a module: what it says, or the first axis of what it holds."""
    said = getattr(experts, "num_experts", None)
    count = said if isinstance(said, int) else next((len(one) for one in experts.parameters() if one.ndim == 3), 0)
    if count < 1:
        raise _strange(family, name, "how many there are cannot be told")
    return int(count)


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
