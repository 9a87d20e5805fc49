"""Router logits of real, small models: the picks and weights that are recovered are those that the routers made."""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perfmodel.errors import TraceError
from perfmodel.routing.importers.base import ImportOptions
from perfmodel.routing.importers.probe import Probe
from perfmodel.routing.importers.router_logits import read, recognise
from perfmodel.routing.importers.rules import FAMILIES as RULES
from perfmodel.routing.importers.rules import routing_rule
from perfmodel.routing.trace import RoutingTrace

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

BATCH, LENGTH, EXPERTS = 3, 11, 8

_COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_LATENT = {
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}
#: Router class and options of a config, by a name that starts with the family.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralTopKRouter", {"num_local_experts": EXPERTS}),
    "qwen2_moe": ("Qwen2MoeTopKRouter", {"num_experts": EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen2_moe normalised": (
        "Qwen2MoeTopKRouter",
        {"num_experts": EXPERTS, "shared_expert_intermediate_size": 16, "norm_topk_prob": True},
    ),
    "qwen3_moe": ("Qwen3MoeTopKRouter", {"num_experts": EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "olmoe": ("OlmoeTopKRouter", {"num_experts": EXPERTS}),
    "flex_olmo": ("FlexOlmoTopKRouter", {"num_experts": EXPERTS, "norm_topk_prob": True}),
    "minimax": ("MiniMaxTopKRouter", {"num_local_experts": EXPERTS}),
    "gpt_oss": ("GptOssTopKRouter", {"num_local_experts": EXPERTS}),
    "granitemoe": ("GraniteMoeTopKRouter", {"num_local_experts": EXPERTS}),
    "granitemoeshared": ("GraniteMoeSharedTopKRouter", {"num_local_experts": EXPERTS}),
    "llama4_text": ("Llama4Router", {"num_local_experts": EXPERTS, "intermediate_size_mlp": 24}),
    "phimoe": ("PhimoeTopKRouter", {"num_local_experts": EXPERTS, "router_jitter_noise": 0.3}),
    "deepseek_v2": ("DeepseekV2TopkRouter", {**_LATENT, "topk_method": "greedy", "routed_scaling_factor": 1.5}),
    "deepseek_v2 by group": (
        "DeepseekV2TopkRouter",
        {
            **_LATENT,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 16.0,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3TopkRouter",
        {**_LATENT, "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    ),
    "glm4_moe": (
        "Glm4MoeTopkRouter",
        {**_LATENT, "n_group": 2, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0},
    ),
}


_GROUPED = {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
#: Module, router class and options of the families whose models are slow or tedious to build.
ROUTERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "jamba": ("jamba", "JambaTopKRouter", {"num_experts": EXPERTS}),
    "qwen3_next": ("qwen3_next", "Qwen3NextTopKRouter", {"num_experts": EXPERTS, "norm_topk_prob": True}),
    "qwen3_vl_moe_text": ("qwen3_vl_moe", "Qwen3VLMoeTextTopKRouter", {"num_experts": EXPERTS}),
    "qwen3_5_moe_text": ("qwen3_5_moe", "Qwen3_5MoeTopKRouter", {"num_experts": EXPERTS}),
    "granitemoehybrid": (
        "granitemoehybrid",
        "GraniteMoeHybridTopKRouter",
        {"num_local_experts": EXPERTS, "mamba_n_heads": 4, "mamba_d_head": 16},
    ),
    "deepseek_v32": ("deepseek_v32", "DeepseekV32TopkRouter", {"n_routed_experts": EXPERTS, **_GROUPED}),
    "dots1": ("dots1", "Dots1TopkRouter", {"n_routed_experts": EXPERTS, **_GROUPED}),
    "exaone_moe": ("exaone_moe", "ExaoneMoeTopkRouter", {"num_experts": EXPERTS, **_GROUPED}),
    "glm4_moe_lite": ("glm4_moe_lite", "Glm4MoeLiteTopkRouter", {"n_routed_experts": EXPERTS, **_GROUPED}),
    "glm_moe_dsa": ("glm_moe_dsa", "GlmMoeDsaTopkRouter", {"n_routed_experts": EXPERTS, **_GROUPED}),
    "solar_open": ("solar_open", "SolarOpenTopkRouter", {"n_routed_experts": EXPERTS, **_GROUPED}),
    "minimax_m2": ("minimax_m2", "MiniMaxM2TopKRouter", {"num_local_experts": EXPERTS}),
}


class Recorded:
    """A random model, what its routers returned, and what it gives out as router logits."""

    def __init__(self, folder: Path, name: str) -> None:
        family = name.split()[0]
        router, options = FAMILIES[name]
        torch.manual_seed(len(name))
        config = transformers.CONFIG_MAPPING[family](**{**_COMMON, **options})
        config._attn_implementation = "eager"
        self.model = transformers.AutoModelForCausalLM.from_config(config).eval()
        self.routed: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
        self.biases: list[np.ndarray[Any, Any]] = []
        self.layers = []
        for path, module in self.model.named_modules():
            if type(module).__name__ == router:
                self.layers.append(int(path.split("layers.")[1].split(".")[0]))
                for _, weight in module.named_parameters():
                    torch.nn.init.normal_(weight, std=1.0)
                if hasattr(module, "e_score_correction_bias"):
                    torch.nn.init.normal_(module.e_score_correction_bias, std=0.2)
                    self.biases.append(module.e_score_correction_bias.numpy())
                module.register_forward_hook(self._note)
        with torch.no_grad():
            ids = torch.randint(0, 97, (BATCH, LENGTH))
            self.logits = self.model(ids, output_router_logits=True).router_logits
        self.config = folder / "config.json"
        self.config.write_text(json.dumps(config.to_dict()))
        self.file = folder / "logits.npz"
        arrays = {f"router_logits.{i}": one.float().numpy() for i, one in enumerate(self.logits)}
        if self.biases:
            arrays["e_score_correction_bias"] = np.stack(self.biases)
        np.savez(self.file, **arrays)

    def _note(self, module: Any, inputs: Any, outputs: Any) -> None:
        if type(module).__name__ == "Llama4Router":
            scores, logits = outputs
            ids = torch.topk(logits, module.top_k, dim=1).indices
            self.routed.append((ids.numpy(), scores.gather(1, ids).numpy()))
        else:
            self.routed.append((outputs[2].numpy(), outputs[1].float().numpy()))

    def options(self, **changes: Any) -> ImportOptions:
        return ImportOptions(config=self.config, sequence_len=(LENGTH,), prompt_len=(4,), **changes)


def read_trace(file: Path, options: ImportOptions) -> RoutingTrace:
    result = read([file], options).result
    assert isinstance(result, RoutingTrace)
    return result


@pytest.mark.parametrize("name", FAMILIES)
def test_picks_are_those_of_the_routers(tmp_path: Path, name: str) -> None:
    recorded = Recorded(tmp_path, name)
    # A config tells which layers have experts only where perfmodel knows the family; else the user does.
    layers = None if name in ("mixtral", "qwen3_moe", "olmoe", "gpt_oss") else tuple(recorded.layers)
    trace = read_trace(recorded.file, recorded.options(layers=layers))
    assert trace.layer_index.tolist() == recorded.layers
    assert trace.num_experts == EXPERTS
    assert trace.metadata["tied_picks"] == 0
    assert trace.topk_ids.shape == (BATCH * LENGTH, len(recorded.layers), 2)
    assert trace.topk_weights is not None
    for layer, (ids, weights) in enumerate(recorded.routed):
        np.testing.assert_array_equal(np.sort(trace.topk_ids[:, layer], axis=1), np.sort(ids, axis=1))
        order, given = np.argsort(trace.topk_ids[:, layer], axis=1), np.argsort(ids, axis=1)
        found = np.take_along_axis(trace.topk_weights[:, layer], order, 1)
        np.testing.assert_allclose(found, np.take_along_axis(weights, given, 1), rtol=2e-6, atol=0)
    if name not in ("phimoe",):
        assert (np.diff(trace.topk_weights, axis=2) <= 0).all()


@pytest.mark.parametrize("family", ROUTERS)
def test_rules_are_those_of_routers_alone(family: str) -> None:
    module, router_class, options = ROUTERS[family]
    modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    config = transformers.CONFIG_MAPPING[family](hidden_size=32, num_experts_per_tok=2, **options)
    torch.manual_seed(1)
    router = getattr(modeling, router_class)(config).eval()
    bias = torch.randn(EXPERTS) * 0.2
    with torch.no_grad():
        router.weight.normal_()
        if hasattr(router, "e_score_correction_bias"):
            router.e_score_correction_bias.copy_(bias)
        hidden = torch.randn(50, 32)
        logits, weights, ids = router(hidden, bias) if family == "minimax_m2" else router(hidden)
    rule = routing_rule(family, config.to_dict(), None, EXPERTS, "file")
    picks = rule.apply(logits.numpy(), bias.numpy())
    assert not picks.tied.any()
    order, given = np.argsort(picks.ids, axis=1), np.argsort(ids.numpy(), axis=1)
    np.testing.assert_array_equal(np.sort(picks.ids, axis=1), np.sort(ids.numpy(), axis=1))
    wanted = np.take_along_axis(weights.numpy(), given, 1)
    np.testing.assert_allclose(np.take_along_axis(picks.weights, order, 1), wanted, rtol=2e-6, atol=0)


def test_every_family_is_compared_with_transformers() -> None:
    assert {name.split()[0] for name in FAMILIES} | set(ROUTERS) | {"switch_transformers"} == set(RULES)


def test_deepseek_v3_is_refused_without_its_bias(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path, "deepseek_v3")
    np.savez(tmp_path / "bare.npz", **{f"router_logits.{i}": one.numpy() for i, one in enumerate(recorded.logits)})
    with pytest.raises(TraceError, match="picks of deepseek_v3 are not in its logits alone"):
        read_trace(tmp_path / "bare.npz", recorded.options())


def test_tuples_in_a_pt_file_and_the_calls_of_a_generation(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path, "mixtral")
    torch.save({"router_logits": recorded.logits}, tmp_path / "call.pt")
    plain = read_trace(recorded.file, recorded.options())
    assert np.array_equal(read_trace(tmp_path / "call.pt", recorded.options()).topk_ids, plain.topk_ids)
    torch.save(recorded.logits, tmp_path / "bare.pt")
    assert np.array_equal(read_trace(tmp_path / "bare.pt", recorded.options()).topk_ids, plain.topk_ids)

    # The same logits as a generation gives them: the prompt in one call, then one token of each sequence a call.
    by_sequence = [one.reshape(BATCH, LENGTH, EXPERTS) for one in recorded.logits]
    cuts = [(0, 9), (9, 10), (10, 11)]
    calls = tuple(tuple(one[:, a:b].reshape(-1, EXPERTS).clone() for one in by_sequence) for a, b in cuts)
    torch.save({"router_logits": calls}, tmp_path / "calls.pt")
    stepped = read_trace(tmp_path / "calls.pt", ImportOptions(config=recorded.config))
    assert stepped.prompt_len.tolist() == [9] * BATCH
    np.testing.assert_array_equal(stepped.topk_ids, plain.topk_ids)
    np.testing.assert_array_equal(stepped.sequence_offsets, plain.sequence_offsets)


def test_lists_of_tensors_are_recognised_by_their_numbers(tmp_path: Path) -> None:
    file = tmp_path / "a.pt"
    for content, found in (
        ((torch.zeros(3, 8), torch.zeros(3, 8)), "holds router_logits.0"),
        ({"router_logits": (torch.zeros(3, 8),)}, "holds router_logits.0"),
        ({"encoder_router_logits": torch.zeros(1, 2, 3, 8)}, "holds encoder_router_logits"),
        ([(torch.zeros(5, 8),) * 2, (torch.zeros(1, 8),) * 2], "holds router_logits.0"),
        ([(torch.zeros(5, 8),), (torch.zeros(1, 7),)], None),
        ([torch.zeros(3, 5000)] * 2, None),
        ([torch.zeros(3, 8, dtype=torch.int32)], None),
        ([torch.zeros(8)], None),
        (torch.zeros(3, 8), None),
        ([], None),
    ):
        torch.save(content, file)
        assert recognise(Probe.of(file)) == found


def test_bfloat16_logits_tie_and_say_so(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path, "mixtral")
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0]], dtype=torch.bfloat16)
    torch.save({"router_logits": [logits] * 3}, tmp_path / "tie.pt")
    trace = read_trace(tmp_path / "tie.pt", ImportOptions(config=recorded.config, sequence_len=(1,), prompt_len=(1,)))
    assert trace.topk_ids.tolist() == [[[1, 2]] * 3]
    assert trace.metadata["tied_picks"] == 3


def test_switch_drops_tokens_beyond_the_capacity_of_an_expert(tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = transformers.SwitchTransformersConfig(
        vocab_size=97, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_decoder_layers=2, num_heads=2, num_experts=4,
        num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, expert_capacity=2, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = transformers.SwitchTransformersModel(config).eval()
    routed: dict[str, Any] = {}
    for path, module in model.named_modules():
        if type(module).__name__ == "SwitchTransformersTop1Router":
            side = path.partition(".")[0]
            torch.nn.init.normal_(module.classifier.weight, std=1.0)
            module.register_forward_hook(lambda _, __, out, side=side: routed.update({side: out}))
    with torch.no_grad():
        ids = torch.randint(1, 97, (BATCH, LENGTH))
        model(input_ids=ids, decoder_input_ids=ids[:, :6])
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    for side, prompt in (("encoder", LENGTH), ("decoder", 2)):
        one_hot, weights, logits = routed[side]
        np.savez(tmp_path / f"{side}.npz", **{f"{side}_router_logits": logits.numpy()[None]})
        said = None if side == "encoder" else (2,)
        options = ImportOptions(config=tmp_path, layers=(1,), prompt_len=said)
        trace = read_trace(tmp_path / f"{side}.npz", options)
        assert trace.prompt_len.tolist() == [prompt] * BATCH
        dropped = (one_hot.sum(-1) == 0).numpy().ravel()
        assert dropped.any()
        found = trace.topk_ids[:, 0, 0]
        np.testing.assert_array_equal(found == trace.unassigned, dropped)
        np.testing.assert_array_equal(found[~dropped], one_hot.argmax(-1).numpy().ravel()[~dropped])
        assert trace.topk_weights is not None
        np.testing.assert_allclose(
            trace.topk_weights[~dropped, 0, 0], weights.numpy().ravel()[~dropped], rtol=2e-6, atol=0
        )
        assert trace.metadata["dropped_picks"] == dropped.sum()
