"""How many parameters a network has by layer, and how many of them a token leaves idle."""

from perfmodel.families import Shape, params_of


def head_params(shape: Shape) -> int:
    """Parameters of the LM head that every token reads; with tied embeddings those of the embedding table."""
    return params_of(shape.head)


def by_layer(shape: Shape) -> list[dict[str, int | str]]:
    """One row for each layer: its kinds and its parameters by class."""
    rows: list[dict[str, int | str]] = [{} for _ in range(shape.num_layers)]
    for kind in shape.attention:
        for layer in kind.layers:
            rows[layer] |= {"layer": layer, "attention_kind": kind.name, "attention": kind.params}
            rows[layer]["norm"] = kind.norm_params
    for ffn in shape.feed_forward:
        experts = 0 if ffn.experts is None else ffn.experts.count * ffn.experts.params
        for layer in ffn.layers:
            rows[layer] |= {
                "feed_forward_kind": ffn.name,
                "dense": params_of(ffn.dense),
                "shared": params_of(ffn.shared),
                "router": params_of(ffn.router),
                "expert": experts,
                "norm": int(rows[layer]["norm"]) + ffn.norm_params,
            }
    return rows


def idle_params(shape: Shape) -> int:
    """Parameters of the routed experts that one token does not visit, over all layers."""
    return sum(
        len(kind.layers) * (kind.experts.count - kind.experts.top_k) * kind.experts.params
        for kind in shape.feed_forward
        if kind.experts is not None
    )
