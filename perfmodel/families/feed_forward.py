"""Builders of the feed-forward networks that several families share."""

from collections.abc import Callable, Sequence

from perfmodel.errors import ModelConfigError
from perfmodel.families.attention import linear
from perfmodel.families.keys import ConfigKeys, one_line
from perfmodel.families.network import Attention, Experts, FeedForward, Shape, Tensor, Tensors


def gated(
    prefix: str,
    hidden: int,
    width: int,
    *,
    bias: bool = False,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Tensors:
    """A gated network: gate and up projections, and down."""
    gate, up, down = names
    return (
        *linear(f"{prefix}.{gate}", hidden, width, bias=bias),
        *linear(f"{prefix}.{up}", hidden, width, bias=bias),
        *linear(f"{prefix}.{down}", width, hidden, bias=bias),
    )


def plain(
    prefix: str, hidden: int, width: int, *, bias: bool = False, names: tuple[str, str] = ("up_proj", "down_proj")
) -> Tensors:
    """A network of two matrices."""
    return (
        *linear(f"{prefix}.{names[0]}", hidden, width, bias=bias),
        *linear(f"{prefix}.{names[1]}", width, hidden, bias=bias),
    )


def count_and_top_k(config: ConfigKeys) -> tuple[int, int]:
    """Routed experts of a layer, and how many of them one token visits; refused where the router cannot do that."""
    experts, top_k = config.size("num_experts"), config.size("top_k")
    check_top_k(config, experts, top_k)
    return experts, top_k


def check_top_k(config: ConfigKeys, experts: int, top_k: int) -> None:
    """Refuse a top-k that the number of experts, or a grouped router, cannot give.

    A grouped router (DeepSeek-V2, arXiv:2405.04434; DeepSeek-V3, arXiv:2412.19437, section 2.1.2) splits the experts
    into equal groups, keeps ``topk_group`` of them by their two best scores, and picks within those.
    """
    if top_k > experts:
        raise config.error(config.key("top_k"), f"at most the number of experts, {experts}")
    groups = config.size("expert_groups") if config.has("expert_groups") else 1
    if experts % groups:
        raise config.error(config.key("expert_groups"), f"a divisor of the number of experts, {experts}")
    kept = config.size("kept_groups") if groups > 1 or config.has("kept_groups") else 1
    if kept > groups:
        raise config.error(config.key("kept_groups"), f"at most the number of groups, {groups}")
    each = experts // groups
    if groups > 1 and each < 2:
        raise config.error(
            config.key("expert_groups"), f"at most {experts // 2}, for a group is judged by its two best experts"
        )
    if top_k > kept * each:
        raise config.error(config.key("top_k"), f"at most {kept * each}, the experts of {kept} kept groups of {each}")


def moe_layers_of(config: ConfigKeys, layers: Sequence[int], *fields: str) -> tuple[int, ...]:
    """The MoE layers; refused if there is none, with the fields that say so."""
    if not layers:
        found = ", ".join(f"{config.key(field)} {one_line(config.values.get(config.key(field)))}" for field in fields)
        count = one_line(config.values.get(config.key("num_hidden_layers")))
        raise ModelConfigError(
            f"{config.where}: no layer has experts: found {found} with {count} layers; "
            "allowed: values that leave at least one MoE layer"
        )
    return tuple(layers)


def dense_and_moe(
    num_layers: int,
    moe_layers: tuple[int, ...],
    *,
    norm_params: int,
    dense: Tensors = (),
    experts: Experts,
    router: Tensors,
    shared: Tensors = (),
    beside: Tensors = (),
) -> tuple[FeedForward, ...]:
    """The usual two kinds of layers: dense ones, where there are any, and those with experts.

    ``beside`` is a dense network that runs beside the experts in every MoE layer.
    """
    others = tuple(sorted(set(range(num_layers)) - set(moe_layers)))
    moe = FeedForward(
        name="moe",
        layers=moe_layers,
        norm_params=norm_params,
        dense=beside,
        shared=shared,
        router=router,
        experts=experts,
    )
    if not others:
        return (moe,)
    return FeedForward(name="dense", layers=others, norm_params=norm_params, dense=dense), moe


def decoder(
    config: ConfigKeys,
    attention: tuple[Attention, ...],
    feed_forward: tuple[FeedForward, ...],
    *,
    tied: bool,
    final_norm_params: int | None = None,
    head_bias: bool = False,
    num_layers: int | None = None,
    embedding_name: str = "model.embed_tokens",
    head_name: str = "lm_head",
    left_out: tuple[str, ...] = (),
) -> Shape:
    """A decoder: one embedding table, the layers, a last norm and a head. ``tied`` is the default of the flag.

    ``num_layers`` is for configs that count their layers otherwise than by ``num_hidden_layers``.
    """
    hidden, vocab = config.size("hidden_size"), config.size("vocab_size")
    return Shape(
        hidden_size=hidden,
        num_layers=config.size("num_hidden_layers") if num_layers is None else num_layers,
        attention=attention,
        feed_forward=feed_forward,
        vocab_size=vocab,
        embedding=(Tensor(embedding_name, (vocab, hidden)),),
        head=linear(head_name, hidden, vocab, bias=head_bias),
        final_norm_params=hidden if final_norm_params is None else final_norm_params,
        tied_embeddings=config.flag("tie_word_embeddings", default=tied),
        left_out=left_out,
    )


#: Required keys of families whose every layer has experts of the width ``intermediate_size``.
UNIFORM_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_experts",
    "top_k",
    "vocab_size",
)


def uniform(
    config: ConfigKeys,
    attention: tuple[Attention, ...],
    *,
    expert: Callable[[int, int], Tensors],
    router: str,
    router_bias: bool = False,
    norm_params: int | None = None,
    tied: bool = False,
) -> Shape:
    """A decoder whose every layer has experts of the width ``intermediate_size``.

    expert : the tensors of one expert, from width of the network and of the expert. norm_params : those of each layer
    around the experts; by default one norm.
    """
    hidden, num_layers, width = (config.size(key) for key in ("hidden_size", "num_hidden_layers", "intermediate_size"))
    count, top_k = count_and_top_k(config)
    kinds = dense_and_moe(
        num_layers,
        tuple(range(num_layers)),
        norm_params=hidden if norm_params is None else norm_params,
        experts=Experts(count=count, top_k=top_k, size=width, tensors=expert(hidden, width)),
        router=linear(router, hidden, count, bias=router_bias),
    )
    return decoder(config, attention, kinds, tied=tied)


#: Keys that count layers for multi-token prediction, which publishers leave out of their totals.
_PREDICTION = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers", "mtp_num_layers")


def prediction_layers(config: ConfigKeys) -> tuple[str, ...]:
    """A sentence for each key that counts layers for multi-token prediction, which are not part of the network."""
    counts = [(key, config.size(key, least=0)) for key in _PREDICTION if config.has(key)]
    return tuple(
        f"{count} layer{'s' if count > 1 else ''} for multi-token prediction left out ({key})"
        for key, count in counts
        if count
    )
