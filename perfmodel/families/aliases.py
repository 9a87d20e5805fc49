"""The one table of how config files spell what the family readers ask for.

A reader asks for a field by its name here; a field that is not listed has one spelling, its name. The widths of
experts are not in the table where a family puts them under a key that means something else elsewhere
(``intermediate_size``): that is the business of its reader.
"""

from types import MappingProxyType

#: Field to its spellings. Two spellings in one file must not disagree.
ALIASES = MappingProxyType(
    {
        "hidden_size": ("hidden_size", "d_model", "n_embd"),
        "num_hidden_layers": ("num_hidden_layers", "n_layers", "n_layer"),
        "num_attention_heads": ("num_attention_heads", "n_heads", "n_head"),
        "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "num_attention_groups"),
        "head_dim": ("head_dim", "attention_head_dim"),
        "num_experts": (
            "num_local_experts",
            "num_experts",
            "n_routed_experts",
            "moe_num_experts",
        ),
        "top_k": (
            "num_experts_per_tok",
            "num_experts_per_token",
            "experts_per_token",
            "moe_top_k",
            "moe_topk",
            "moe_k",
            "top_k_experts",
        ),
        "expert_size": ("moe_intermediate_size",),
        "shared_experts": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert"),
        "expert_groups": ("n_group", "num_expert_group"),
        "kept_groups": ("topk_group", "moe_topk_group"),
        "dtype": ("dtype", "torch_dtype"),
    }
)

#: Keys that look like a mixture of experts and change neither sizes nor what is stored: training, scores, placement.
HARMLESS = frozenset(
    {
        "aux_loss_alpha",
        "ep_size",
        "normalize_router_prob_before_dropping",
        "moe_token_dropout",
        "moe_eval_capacity_token_fraction",
        "expert_dropout",
        "batch_prioritized_routing",
        "expert_capacity",
        "moe_dropout",
        "moe_renormalize",
        "moe_router_activation_func",
        "moe_router_dtype",
        "moe_shared_expert_overlap",
        "moe_router_scaling_factor",
        "moe_norm_min",
        "moe_normalize_expert_weights",
        "moe_loss_weight",
        "moe_jitter_eps",
        "moe_capacity",
        "norm_topk_prob",
        "output_router_logits",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "router_z_loss_coef",
        "routed_scaling_factor",
        "scoring_func",
        "seq_aux",
        "topk_method",
    }
)


def spellings(field: str) -> tuple[str, ...]:
    """The keys under which a field may stand."""
    return ALIASES.get(field, (field,))
