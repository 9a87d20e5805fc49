"""The recorder: rows that are what the experts get, phases, sampling, and refusals."""

import functools
import inspect
import json
import shutil
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest
import recorded

from perfmodel.errors import ModelConfigError, PerfModelError
from perfmodel.record import Prompt, record_trace
from perfmodel.record import trace as trace_module
from perfmodel.record.blocks import expert_blocks, load_model, outline
from perfmodel.record.chat import Reader
from perfmodel.record.generate import Generation
from perfmodel.record.sampling import Sampling
from perfmodel.record.trace import run_prompts
from perfmodel.routing import RoutingTrace

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402  # below the skips

#: Layers with experts, by family.
FAMILIES = {
    "mixtral": (0, 1, 2),
    "qwen2_moe": (0, 1, 2),
    "qwen3_moe": (1, 2),
    "olmoe": (0, 1, 2),
    "gpt_oss": (0, 1, 2),
    "phimoe": (0, 1, 2),
    "granitemoe": (0, 1, 2),
    "hunyuan_v1_moe": (0, 1, 2),
    "minimax": (0, 1, 2),
    "deepseek_v2": (1, 2),
    "deepseek_v3": (1, 2),
    "jamba": (1,),
}
TEXTS = ["once upon a time there was", "x", "def main(): return 0"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixtral of three layers, with one token a byte."""
    return recorded.save_model(recorded.make_model(), tmp_path_factory.mktemp("record") / "toy-moe")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three prompts."""
    file = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    file.write_text("\n".join(TEXTS), encoding="utf-8")
    return file


def token_ids(*lengths: int) -> list[Any]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, 300, length) for length in lengths]


def experts_of(model: Any) -> dict[int, Any]:
    """The experts of every layer by its number."""
    return {
        int(next(part for part in name.split(".") if part.isdecimal())): module
        for name, module in model.named_modules()
        if name.endswith(".experts")
    }


def whole_call(model: Any, tokens: Any) -> dict[int, tuple[Any, Any]]:
    """Inputs and outputs of the experts of every layer when all tokens are read in one call without a cache."""
    seen: dict[int, tuple[Any, Any]] = {}
    hooks = [
        module.register_forward_hook(lambda _, given, out, layer=layer: seen.update({layer: (given[0], out)}))
        for layer, module in experts_of(model).items()
    ]
    with torch.inference_mode():
        model(torch.from_numpy(tokens)[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return {layer: tuple(one.reshape(-1, one.shape[-1]) for one in pair) for layer, pair in seen.items()}  # type: ignore[misc]


@pytest.mark.parametrize("family", FAMILIES)
def test_picks_and_weights_make_the_experts_output(family: str) -> None:
    """In one call of the whole sequence every output is the weighted sum of what the recorded experts make alone."""
    model = recorded.make_model(family)
    for found in run_prompts(model, token_ids(13, 1), 6, Sampling(seed=2)):
        assert found.ids.shape == (found.prompt_len + 6, len(FAMILIES[family]), recorded.TOP_K)
        assert (np.diff(found.weights, axis=-1) <= 0).all()
        seen = whole_call(model, found.tokens)
        assert tuple(seen) == FAMILIES[family]
        for row, (layer, (given, out)) in enumerate(seen.items()):
            total = torch.zeros_like(out)
            for pick in range(recorded.TOP_K):
                ids = torch.from_numpy(found.ids[:, row, pick : pick + 1].astype(np.int64))
                weights = torch.from_numpy(found.weights[:, row, pick : pick + 1])
                with torch.inference_mode():
                    total += experts_of(model)[layer](given, ids, torch.ones_like(weights)) * weights
            assert (total - out).abs().max() < 1e-4 * out.abs().max()
    assert not any(module._forward_pre_hooks for module in experts_of(model).values())


def test_records_what_the_routers_say() -> None:
    """Mixtral's rule on `output_router_logits` of one call: softmax, the two largest, renormalised."""
    model = recorded.make_model()
    for found in run_prompts(model, token_ids(20, 3), 12, Sampling()):
        with torch.inference_mode():
            logits = model(torch.from_numpy(found.tokens)[None], output_router_logits=True).router_logits
        for layer, one in enumerate(logits):
            odds = np.exp(one.numpy().astype(float))
            order = np.argsort(-odds, axis=1)[:, : recorded.TOP_K]
            np.testing.assert_array_equal(found.ids[:, layer], order)
            picked = np.take_along_axis(odds, order, axis=1)
            np.testing.assert_allclose(
                found.weights[:, layer], picked / picked.sum(1, keepdims=True), rtol=1e-4, atol=0
            )


def by_library(model: Any, prompt: Any, new_tokens: int) -> Any:
    """What Transformers' own loop generates, always the likeliest token."""
    return model.generate(
        torch.from_numpy(prompt)[None],
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=new_tokens,
        do_sample=False,
    )[0].numpy()


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v2", "jamba"])
def test_the_likeliest_tokens_are_those_of_the_librarys_own_loop(family: str) -> None:
    model = recorded.make_model(family)
    for prompt, found in zip(token_ids(9, 2), run_prompts(model, token_ids(9, 2), 15, Sampling(0.0)), strict=True):
        np.testing.assert_array_equal(found.tokens, by_library(model, prompt, 15))
        assert (found.prompt_len, found.ended) == (len(prompt), False)


def test_an_answer_ends_where_the_librarys_own_loop_ends_it() -> None:
    model = recorded.make_model()
    (prompt,) = token_ids(9)
    free = by_library(model, prompt, 15)[9:]
    first = int(np.unique(free, return_index=True)[1].max())  # place of a token that was not drawn before
    for marks in (int(free[first]), [299, 100_000, int(free[first])]):
        model.generation_config.eos_token_id = marks
        (found,) = run_prompts(model, [prompt], 15, Sampling(0.0))
        np.testing.assert_array_equal(found.tokens, by_library(model, prompt, 15))
        assert found.ended
        assert len(found.tokens) == len(found.ids) == 9 + first + 1  # the mark itself has a row
    (found,) = run_prompts(model, [prompt], 15, Sampling(0.0), ignore_eos=True)
    assert len(found.tokens) == 9 + 15
    assert free[first] not in found.tokens[9:]
    assert not found.ended
    # The config is asked where the generation config does not say.
    model.generation_config.eos_token_id, model.config.eos_token_id = None, int(free[first])
    assert run_prompts(model, [prompt], 15, Sampling(0.0))[0].ended


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_mark_of_the_end_below_zero_stands_for_none(ignore_eos: bool) -> None:
    model = recorded.make_model()
    with torch.no_grad():
        model.lm_head.weight[-1] = 50 * model.lm_head.weight[0]  # the last token of the vocabulary is often likeliest
    before = run_prompts(model, token_ids(9), 12, Sampling(0.0))[0].tokens
    assert model.config.vocab_size - 1 in before
    model.generation_config.eos_token_id = [-1]
    (found,) = run_prompts(model, token_ids(9), 12, Sampling(0.0), ignore_eos=ignore_eos)
    np.testing.assert_array_equal(found.tokens, before)


def test_tokens_are_drawn_from_the_models_own_logits() -> None:
    """A plain loop without a cache draws the same tokens."""
    model, sampling = recorded.make_model(), Sampling(0.7, 0.9, 50, seed=11)
    for number, found in enumerate(run_prompts(model, token_ids(6, 4), 10, sampling)):
        tokens, stream = token_ids(6, 4)[number].tolist(), sampling.stream(number)
        with torch.inference_mode():
            for _ in range(10):
                tokens.append(sampling.draw(model(torch.tensor([tokens])).logits[0, -1].numpy(), stream))
        assert found.tokens.tolist() == tokens


class Calls(TorchDispatchMode):  # type: ignore[misc]
    """Counts the operations that PyTorch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, kinds: Any, given: Any = (), named: Any = None) -> Any:
        self.count += 1
        return function(*given, **(named or {}))


def loop(model: Any, tokens: Any, prompt_len: int) -> Iterator[Any]:
    """Logits of the same calls that a recording of these tokens makes."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache = None
    for start, stop in [(0, prompt_len), *((i, i + 1) for i in range(prompt_len, len(tokens)))]:
        given = torch.tensor([tokens[start:stop].tolist()])
        with torch.inference_mode():
            out = model(given, use_cache=True, logits_to_keep=1, **{name: cache})
        cache = out[name]
        yield out.logits


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_logits_are_the_same_bits_with_and_without_hooks(family: str) -> None:
    model = recorded.make_model(family)
    with_hooks: list[Any] = []
    handle = model.register_forward_hook(lambda _, __, out: with_hooks.append(out.logits))
    (found,) = run_prompts(model, token_ids(11), 8, Sampling(seed=4))
    handle.remove()
    without = list(loop(model, found.tokens, 11))
    assert len(with_hooks) == len(without) == 9
    for one, other in zip(with_hooks, without, strict=True):
        assert torch.equal(one, other)


def test_hooks_cost_a_few_operations_a_layer_and_call_however_long_the_prompt_is() -> None:
    model = recorded.make_model()
    added = []
    for length in (3, 120):
        (found,) = run_prompts(model, token_ids(length), 5, Sampling(0.0))
        with Calls() as alone:
            assert len(list(loop(model, found.tokens, length))) == 6
        with Calls() as watched:
            run_prompts(model, token_ids(length), 5, Sampling(0.0))
        added.append(watched.count - alone.count)
    assert abs(added[0] - added[1]) <= 6
    assert 0 < added[1] <= 6 * (12 * recorded.LAYERS + 12)
    assert added[1] < 0.25 * alone.count


def test_a_recording_of_files(checkpoint: Path, prompts: Path) -> None:
    told: list[tuple[int, int]] = []
    trace = record_trace(
        checkpoint,
        prompts,
        max_new_tokens=5,
        temperature=0.8,
        seed=7,
        keep_text=True,
        report=lambda done, total: told.append((done, total)),
    )
    lengths = [len(text) for text in TEXTS]  # one token a byte
    assert trace.prompt_len.tolist() == lengths
    assert trace.sequence_lengths.tolist() == [length + 5 for length in lengths]
    assert (trace.num_layers, trace.top_k, trace.num_experts) == (3, recorded.TOP_K, recorded.EXPERTS)
    assert trace.layer_index.tolist() == [0, 1, 2]
    assert trace.topk_weights is not None
    np.testing.assert_allclose(trace.topk_weights.sum(axis=-1), 1, rtol=1e-6, atol=0)
    assert told[-1] == (sum(lengths) + 15, sum(lengths) + 15)
    assert told == sorted(set(told))
    info = trace.metadata
    assert (info["model"], info["family"], info["source"]) == ("toy-moe", "mixtral", "recorded")
    assert info["sampling"] == {"temperature": 0.8, "top_p": 1.0, "top_k": None, "seed": 7}
    assert info["prompts"]["name"] == "prompts.txt"
    assert [one["prompt"] for one in info["texts"]] == TEXTS
    again = record_trace(checkpoint, prompts, max_new_tokens=5, temperature=0.8, seed=7, keep_text=True)
    assert again.content_hash() == trace.content_hash()
    other = record_trace(checkpoint, prompts, max_new_tokens=5, temperature=0.8, seed=8)
    assert not np.array_equal(other.topk_ids, trace.topk_ids)
    assert "texts" not in other.metadata
    # What a sequence draws depends on its place, and not on the other prompts.
    changed = record_trace(checkpoint, ["another", *TEXTS[1:]], max_new_tokens=5, temperature=0.8, seed=7)
    for sequence in (1, 2):
        rows = slice(*changed.sequence_offsets[sequence : sequence + 2])
        expected = slice(*trace.sequence_offsets[sequence : sequence + 2])
        np.testing.assert_array_equal(changed.topk_ids[rows], trace.topk_ids[expected])


def test_prompts_alone(checkpoint: Path) -> None:
    trace = record_trace(checkpoint, TEXTS, max_new_tokens=0)
    assert not trace.decode_slice(0).stop - trace.decode_slice(0).start
    assert trace.num_tokens == sum(map(len, TEXTS))
    assert "prompts" not in trace.metadata


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_number_formats(dtype: str, checkpoint: Path) -> None:
    exact, rough = (record_trace(checkpoint, TEXTS, max_new_tokens=0, dtype=name) for name in ("float32", dtype))
    assert rough.metadata["dtype"] == dtype
    assert 0.8 < (rough.topk_ids == exact.topk_ids).mean() <= 1
    assert not np.array_equal(rough.topk_weights, exact.topk_weights)  # type: ignore[arg-type]


def test_conversations_go_through_the_chat_template(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "chat"
    shutil.copytree(checkpoint, folder)
    talk = Prompt(messages=(("system", "be brief"), ("user", "hi")), label="chat")
    with pytest.raises(PerfModelError, match=r"prompt: is a conversation, but .* has no chat template"):
        record_trace(folder, [talk], max_new_tokens=1)
    template = (
        "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<answer>{% endif %}"
    )
    config: dict[str, Any] = {"bos_token": {"content": "^"}, "eos_token": None, "model_max_length": int(1e30)}
    for change in ({"chat_template": template}, {"chat_template": [{"name": "default", "template": template}]}, {}):
        (folder / "tokenizer_config.json").write_text(json.dumps(config | change), encoding="utf-8")
        if not change:
            (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        trace = record_trace(folder, [talk, "plain"], max_new_tokens=1, keep_text=True)
        assert [one["prompt"] for one in trace.metadata["texts"]] == ["^<system>be brief<user>hi<answer>", "plain"]
        assert trace.labels == ("chat", "-")
    for text in ("{", "[1]"):
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
        with pytest.raises(PerfModelError, match=r"tokenizer_config\.json: is (no JSON|\[1\], allowed)"):
            record_trace(folder, [talk], max_new_tokens=1)
    (folder / "tokenizer_config.json").unlink()
    for evil in ("{{ raise_exception('no') }}", "{% for %}", "{{ ''.__class__.__mro__[1].__subclasses__() }}"):
        (folder / "chat_template.jinja").write_text(evil, encoding="utf-8")
        with pytest.raises(PerfModelError, match="prompt: the chat template refuses it"):
            record_trace(folder, [talk], max_new_tokens=1)


def test_the_command(checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
    file = tmp_path / "new" / "trace.npz"
    base = ("trace", "record", "--model", checkpoint, "--prompts", prompts, "-o", file)
    answer = commands.run(*base, "--max-new-tokens", 6, "--temperature", 0.8, "--top-k", 40, "--seed", 3)
    assert (answer.code, answer.err) == (0, f"wrote {file}\n")
    tokens = sum(map(len, TEXTS))
    assert answer.out.splitlines() == [
        "model 'toy-moe' (mixtral, float32 on cpu): 3 layers, top-2 of 4 experts",
        f"3 sequences: {tokens} prompt tokens, 18 new ones (drawn at temperature 0.8, top-p 1, top-k 40, seed 3); 0"
        " ended before 6 tokens or with them",
    ]
    before = file.read_bytes()
    commands.check_refusal(commands.run(*base, "--max-new-tokens", 2), str(file), "exists", "--overwrite")
    assert file.read_bytes() == before
    options = ("--max-new-tokens", 2, "--temperature", 0, "--name", "mine", "--overwrite", "--json")
    found = commands.run(*base, *options).document
    assert (found["prefill_tokens"], found["decode_tokens"]) == (tokens, 6)
    assert (found["layers"], found["num_experts"], found["top_k"], found["out"]) == (3, 4, 2, str(file))
    loaded = RoutingTrace.load(file)
    assert loaded.metadata == found["metadata"]
    assert loaded.metadata["model"] == "mine"
    assert loaded.num_tokens == tokens + 6
    file.write_bytes(b"precious")
    commands.check_refusal(commands.run(*base, *options), "exists and is no trace; it is left alone")
    assert file.read_bytes() == b"precious"
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--max-new-tokens", "-1"], "--max-new-tokens: found -1, allowed: a whole number from 0 up"),
        (["--max-new-tokens", "1024"], "--max-new-tokens: found 1024, allowed: 0 to 1023 for this model"),
        (["--max-new-tokens", "1000"], "line 1: has 26 tokens; allowed: 24"),
        (["--max-new-tokens", "5", "--temperature", "nan"], "--temperature: found nan, allowed: a number from 0"),
        (["--max-new-tokens", "5", "--top-p", "0"], "--top-p: found 0.0, allowed: a number from 1e-6 to 1"),
        (["--max-new-tokens", "5", "--top-k", "0"], "--top-k: found 0, allowed: a whole number from 1 up"),
        (["--max-new-tokens", "5", "--seed", "-1"], "--seed: found -1"),
        (["--max-new-tokens", "5", "--dtype", "int8"], "--dtype"),
        (["--max-new-tokens", "5", "--device", "tpu"], "--device: found 'tpu', allowed: cpu, cuda, cuda:N, mps"),
        (["--max-new-tokens", "5", "--device", "cuda:99"], "--device: found cuda:99, allowed: cpu"),
        (["--max-new-tokens", "5", "--name", "a\nb"], "name: found 'a\\nb', allowed: a line"),
        (["--max-new-tokens", "5", "--download"], "download: of no use with"),
        (["--max-new-tokens", "5", "--prompts", "none.txt"], "given twice"),
        ([], "--max-new-tokens"),
    ],
)
def test_wrong_options(options: list[str], words: str, checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
    base = ("trace", "record", "--model", checkpoint, "--prompts", prompts, "-o", tmp_path / "o.npz")
    commands.check_refusal(commands.run(*base, *options), words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["o.txt", "nowhere.npz/o.npz", "folder.npz"])
def test_an_output_is_looked_at_before_the_model(name: str, prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "nowhere.npz").write_bytes(b"")
    (tmp_path / "folder.npz").mkdir()
    options = ("--model", tmp_path / "no-model", "--prompts", prompts, "--max-new-tokens", 1)
    commands.check_refusal(commands.run("trace", "record", *options, "-o", tmp_path / name), "output", name)


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("llama4_text", "model family llama4_text: layer 0 calls its experts with rows alone, which is not understood"),
        ("llama", "model family llama: no experts were found in it; expected a Mixture-of-Experts"),
    ],
)
def test_families_that_are_not_understood(family: str, words: str, prompts: Path, tmp_path: Path) -> None:
    folder = recorded.save_model(recorded.make_model(family), tmp_path / family)
    options = ("--model", folder, "--prompts", prompts, "--max-new-tokens", 1, "-o", tmp_path / "o.npz")
    commands.check_refusal(commands.run("trace", "record", *options), words)
    assert not (tmp_path / "o.npz").exists()


def test_routing_that_is_not_understood_is_refused() -> None:
    def changed(change: Any, layer: int = 1) -> list[Generation]:
        model = recorded.make_model()
        experts = model.model.layers[layer].mlp.experts
        experts.register_forward_pre_hook(lambda _, given: change(*given))
        experts.forward = lambda hidden, *_: hidden
        return run_prompts(model, token_ids(8), 2, Sampling())

    assert len(changed(lambda hidden, ids, weights: (hidden, ids, weights))) == 1
    for change, words in (
        (lambda hidden, ids, weights: (hidden, ids), "layer 1 calls its experts with torch.int64"),
        (lambda hidden, ids, weights: (hidden, weights, weights), "layer 1 calls its experts with torch.float32"),
        (lambda hidden, ids, weights: (hidden, ids, weights[:, :1]), "layer 1 calls its experts with"),
        (lambda hidden, ids, weights: (hidden, ids * 0 + 5, weights), "layer 1 routes to expert 5, but has 4"),
        (lambda hidden, ids, weights: (hidden, ids * 0 - 1, weights), "layer 1 routes to expert -1, but has 4"),
        (
            lambda hidden, ids, weights: (hidden, ids, weights * torch.nan),
            "layer 1 weighs an expert with nan, .*; try another dtype",
        ),
        (lambda hidden, ids, weights: (hidden, ids, -weights), r"layer 1 weighs an expert with -0\.\d+, expected"),
        (
            lambda hidden, ids, weights: (hidden, ids[:4], weights[:4]),
            "layer 1 has experts that were given 4 rows of 8",
        ),
        (lambda hidden, ids, weights: (hidden, ids[:, :1], weights[:, :1]), "layer 1 picks 1 experts a row, another"),
    ):
        with pytest.raises(ModelConfigError, match=f"model family mixtral: {words}"):
            changed(change)


def test_models_that_cannot_go_on_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = recorded.make_model()
    forward = model.forward

    @functools.wraps(forward)
    def without_cache(*given: Any, **named: Any) -> Any:
        return forward(*given, **{**named, "use_cache": False})

    monkeypatch.setattr(model, "forward", without_cache)
    with pytest.raises(ModelConfigError, match="mixtral: its cache holds 0 tokens of 8"):
        run_prompts(model, token_ids(8), 2, Sampling())
    monkeypatch.undo()
    with pytest.raises(ModelConfigError, match="mixtral: cannot read 1 tokens after 0 others"):
        run_prompts(model, [np.array([300])], 2, Sampling())
    with torch.no_grad():
        model.lm_head.weight[7] = torch.nan
    with pytest.raises(ModelConfigError, match="mixtral: its logits are not finite; try another dtype"):
        run_prompts(model, token_ids(8), 2, Sampling())
    assert not any(module._forward_pre_hooks for module in experts_of(model).values())


def test_hooks_are_gone_after_a_failure() -> None:
    model = recorded.make_model()

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_prompts(model, token_ids(4), 2, Sampling(), report=stop)
    assert not any(module._forward_pre_hooks for module in experts_of(model).values())


def test_an_interrupt_leaves_no_file(
    checkpoint: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Sampling, "draw", stop)
    file = tmp_path / "trace.npz"
    answer = commands.run(
        *("trace", "record", "--model", checkpoint, "--prompts", prompts), "--max-new-tokens", 2, "-o", file
    )
    assert (answer.code, answer.out, answer.err) == (130, "", "perfmodel: interrupted\n")
    assert list(tmp_path.iterdir()) == []


def test_equal_prompts_are_sequences_of_their_own(checkpoint: Path, tmp_path: Path) -> None:
    likeliest, drawn = (
        record_trace(checkpoint, ["again"] * 2, max_new_tokens=20, temperature=heat) for heat in (0.0, 1.0)
    )
    first, second = (likeliest.topk_ids[: likeliest.num_tokens // 2], likeliest.topk_ids[likeliest.num_tokens // 2 :])
    np.testing.assert_array_equal(first, second)
    assert (drawn.topk_ids[:25] != drawn.topk_ids[25:]).any()


def test_numbers_of_other_kinds_are_stored_as_plain_ones(checkpoint: Path, tmp_path: Path) -> None:
    numbers: dict[str, Any] = {"temperature": np.float32(0.5), "top_p": Fraction(1, 2), "top_k": np.int64(5)}
    trace = record_trace(checkpoint, ["x"], max_new_tokens=np.int64(2), seed=np.int64(3), **numbers)  # type: ignore[arg-type]
    trace.save(tmp_path / "trace.npz")
    found = RoutingTrace.load(tmp_path / "trace.npz").metadata["sampling"]
    assert found == {"temperature": 0.5, "top_p": 0.5, "top_k": 5, "seed": 3}


def test_prompt_and_answer_fit_to_the_last_position(checkpoint: Path) -> None:
    positions = outline(checkpoint, expert_blocks).positions
    assert positions is not None
    trace = record_trace(checkpoint, ["x" * (positions - 2)], max_new_tokens=2, ignore_eos=True)
    assert trace.num_tokens == positions
    for length, new in ((positions - 1, 2), (positions + 1, 0), (1, positions)):
        with pytest.raises(PerfModelError, match="allowed: "):
            record_trace(checkpoint, ["x" * length], max_new_tokens=new)


def test_recordings_that_are_too_large_are_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "MAX_BYTES", 100)
    with pytest.raises(PerfModelError, match="prompts and max_new_tokens: 77 tokens in 3 layers take"):
        record_trace(checkpoint, TEXTS, max_new_tokens=10)


def test_the_small_model_of_this_project(shared: Path) -> None:
    """Its picks equal those of `output_router_logits` and of one call without a cache."""
    folder = shared / "tiny-mixtral" / "model"
    texts = ["def main():\n    import os\n", '{"name": "x", "values": [1, 2, 3]}', "The king said to his"]
    trace = record_trace(folder, texts, max_new_tokens=40, temperature=0.8, keep_text=True, name="tiny-mixtral-32l")
    assert (trace.num_layers, trace.num_experts, trace.top_k) == (32, 8, 2)
    model, reader = load_model(folder), Reader(folder, 2048)
    ids = reader.encode([Prompt(text) for text in texts], None)
    again = run_prompts(model, ids, 40, Sampling(0.8))
    np.testing.assert_array_equal(trace.topk_ids, np.concatenate([one.ids for one in again]))
    assert [one["answer"] for one in trace.metadata["texts"]] == [
        reader.decode(one.tokens[one.prompt_len :]) for one in again
    ]
    for one in again:
        with torch.inference_mode():
            logits = model(torch.from_numpy(one.tokens)[None], output_router_logits=True, use_cache=False).router_logits
        expected = np.stack([layer.topk(2).indices.numpy() for layer in logits], axis=1)
        # A call of many rows adds up in another order, so that two experts within rounding may change places.
        assert (one.ids == expected).mean() > 0.999
