"""To which part of a layer the names of tensors in GGUF files belong."""

from typing import Literal

Part = Literal["mixer", "mixer_norm", "feed_forward_norm", "dense", "shared", "router", "expert"]

#: Names within a layer, without ``.weight``.
_PARTS: dict[Part, str] = {
    "mixer": """
        attn_q attn_k attn_v attn_qkv attn_output attn_gate attn_sinks attn_q_norm attn_k_norm attn_sub_norm
        attn_q_a attn_q_b attn_q_a_norm attn_kv_a_mqa attn_kv_a_norm attn_kv_b attn_k_b attn_v_b
        indexer.k_norm indexer.proj indexer.attn_k indexer.attn_q_b
        ssm_in ssm_conv1d ssm_x ssm_dt ssm_dt_norm ssm_a ssm_b_norm ssm_c_norm ssm_d ssm_norm ssm_out
        ssm_alpha ssm_beta ssm_ba ssm_conv1d_q ssm_conv1d_k ssm_conv1d_v ssm_f_a ssm_f_b ssm_g_a ssm_g_b
        shortconv.conv shortconv.in_proj shortconv.out_proj attn_rot_embd rope_freqs
    """,
    "mixer_norm": "attn_norm attn_norm_2 attn_output_norm post_attention_norm",
    "feed_forward_norm": """
        ffn_norm post_ffw_norm post_ffw_norm_1 post_ffw_norm_2 pre_ffw_norm_2 ffn_norm_exps layer_output_norm
        layer_output_scale post_norm
    """,
    "dense": "ffn_gate ffn_up ffn_down ffn_sub_norm ffn_latent_down ffn_latent_up inp_gate proj",
    "shared": "ffn_gate_shexp ffn_up_shexp ffn_down_shexp ffn_gate_inp_shexp",
    "router": "ffn_gate_inp exp_probs_b",
    "expert": "ffn_gate_up_exps ffn_gate_exps ffn_up_exps ffn_down_exps",
}

PARTS: dict[str, Part] = {name: part for part, names in _PARTS.items() for name in names.split()}

#: The matrices of an expert in the order in which they run, and what may stand beside a matrix.
EXPERT_ORDER = ("ffn_gate_up_exps", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
SUFFIXES = ("", ".bias", ".scale", ".input_scale")

#: Tensors that belong to no layer, by class.
OUTSIDE: dict[str, Literal["embedding", "head", "norm"]] = {
    "token_embd": "embedding",
    "position_embd": "embedding",
    "token_types": "embedding",
    "per_layer_token_embd": "embedding",
    "per_layer_model_proj": "embedding",
    "per_layer_proj_norm": "norm",
    "token_embd_norm": "norm",
    "output_norm": "norm",
    "output": "head",
    "rope_freqs": "norm",
    "rope_factors_long": "norm",
    "rope_factors_short": "norm",
}
