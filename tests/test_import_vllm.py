"""What vLLM returns and logs: arrays of picks with prompt lengths, and JSON lines."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from perfmodel.errors import TraceError
from perfmodel.routing import RoutingTrace
from perfmodel.routing.importers import import_files, recognise
from perfmodel.routing.importers.base import ImportOptions
from perfmodel.routing.importers.phases import phases_of_calls

EXPERTS, TOP_K = 6, 2


def picks(tokens: int, layers: int = 3, seed: int = 0, dense: tuple[int, ...] = ()) -> NDArray[np.int32]:
    """Picks as vLLM returns them: zeros in dense layers. The last expert is never expert 0 alone."""
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((tokens, layers, EXPERTS)), axis=2)[:, :, :TOP_K].astype(np.int32)
    ids[:, list(dense)] = 0
    return ids


# ---- arrays ----


def recorded(tokens: int, layers: int, experts: int, top_k: int, seed: int = 0) -> NDArray[np.int32]:
    """Picks of layers that each like experts of their own, from the most to the least wanted."""
    rng = np.random.default_rng(seed)
    wanted = rng.normal(size=(tokens, layers, experts)) + 0.7 * rng.normal(size=(layers, experts))
    return np.argsort(-wanted, axis=2)[:, :, :top_k].astype(np.int32)


def test_an_array_is_cut_at_the_prompt_and_loses_its_dense_layers(tmp_path: Path) -> None:
    ids = recorded(30, 6, EXPERTS, TOP_K)
    ids[:, 0] = 0
    np.save(tmp_path / "request.npy", ids)
    found = import_files(
        "auto", [tmp_path / "request.npy"], ImportOptions(prompt_len=(5,), num_experts=EXPERTS, model="toy")
    )
    trace = found.result
    assert isinstance(trace, RoutingTrace)
    np.testing.assert_array_equal(trace.topk_ids, ids[:, 1:])
    np.testing.assert_array_equal(trace.layer_index, [1, 2, 3, 4, 5])
    assert trace.prompt_len.tolist() == [5]
    assert trace.topk_weights is None
    assert trace.metadata["model"] == "toy"
    assert trace.metadata["import_format"] == "vllm"
    assert trace.metadata["id_space"] == "logical"
    assert "request.npy" in trace.metadata["how"]
    assert not trace.num_experts_inferred
    (padding,) = [one for one in found.findings if one.defect == "padding"]
    assert padding.mended
    assert padding.found.endswith(": 0")


@pytest.mark.parametrize("kind", ["files", "npz", "json", "memory"])
def test_several_requests_in_every_container(tmp_path: Path, kind: str) -> None:
    parts, prompts = [picks(5, seed=1), picks(4, seed=2)], [3, 4]
    if kind == "memory":
        trace = RoutingTrace.from_vllm(parts, prompt_len=prompts, num_experts=EXPERTS)
    elif kind == "files":
        files = [tmp_path / f"{s}.npy" for s in range(2)]
        for file, ids in zip(files, parts, strict=True):
            np.save(file, ids)
        trace = RoutingTrace.from_vllm(files, prompt_len=prompts, num_experts=EXPERTS)
    elif kind == "npz":
        np.savez(tmp_path / "all.npz", r0=parts[0], r1=parts[1], prompt_len=prompts)
        trace = RoutingTrace.from_vllm(tmp_path / "all.npz", num_experts=EXPERTS)
    else:
        document = [
            {"routed_experts": parts[0].tolist(), "prompt_token_ids": [7, 8, 9]},
            {"routed_experts": parts[1].tolist(), "prompt_len": 4},
        ]
        (tmp_path / "all.json").write_text(json.dumps(document))
        assert list(recognise(tmp_path / "all.json")) == ["vllm"]
        trace = RoutingTrace.from_vllm(tmp_path / "all.json", num_experts=EXPERTS)
    np.testing.assert_array_equal(trace.topk_ids, np.concatenate(parts))
    assert trace.prompt_len.tolist() == prompts
    assert trace.sequence_offsets.tolist() == [0, 5, 9]


def test_rows_that_were_never_written(tmp_path: Path) -> None:
    ids = picks(8)
    ids[6:] = 0  # slots behind the last token
    ids[2] = 0  # a token whose picks were lost
    np.save(tmp_path / "r.npy", ids)
    found = import_files("vllm", [tmp_path / "r.npy"], ImportOptions(prompt_len=(4,), num_experts=EXPERTS))
    trace = found.result
    assert isinstance(trace, RoutingTrace)
    assert trace.num_tokens == 6
    assert (trace.topk_ids[2] == trace.unassigned).all()
    kept = [0, 1, 3, 4, 5]
    np.testing.assert_array_equal(trace.topk_ids[kept], ids[kept])
    texts = [one.found for one in found.findings if one.mended]
    assert any(text.startswith("2 rows at the end") for text in texts)
    assert any(text.startswith("3 tokens of a layer without a pick") for text in texts)


def test_one_pick_a_token_keeps_expert_zero() -> None:
    ids = np.array([[0, 1, 0], [0, 0, 0], [0, 2, 0]], np.int16)[:, :, None]
    trace = RoutingTrace.from_vllm(ids, prompt_len=1)
    np.testing.assert_array_equal(trace.topk_ids[:, :, 0], [[1], [0], [2]])
    assert trace.layer_index.tolist() == [1]
    assert trace.num_experts_inferred


def test_one_long_array_of_several_sequences_and_other_layer_numbers(tmp_path: Path) -> None:
    np.save(tmp_path / "r.npy", picks(9))
    trace = RoutingTrace.from_vllm(
        tmp_path / "r.npy", prompt_len=[1, 2], sequence_len=[4, 5], layers=[3, 5, 7], num_experts=EXPERTS
    )
    assert trace.sequence_offsets.tolist() == [0, 4, 9]
    assert trace.prompt_len.tolist() == [1, 2]
    assert trace.layer_index.tolist() == [3, 5, 7]


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        (picks(4), {}, r"r\.npy: does not say which rows are prefill; prompt_len"),
        (picks(4), {"prompt_len": 5}, "prompt_len is 5 for sequence 0, which has 4 rows"),
        (picks(4), {"prompt_len": [1, 2]}, "prompt_len has 2 numbers"),
        (picks(4), {"prompt_len": 1, "num_experts": 3}, r"allowed are 0\.\.2"),
        (picks(4), {"prompt_len": 1, "layers": [1, 2]}, "layers names 2 layers; allowed: 3"),
        (picks(4), {"prompt_len": 1, "sequence_len": 3}, "sequence_len adds up to 3 rows, the file has 4"),
        (picks(4), {"prompt_len": -1}, "prompt_len is -1"),
        (
            picks(4)[0],
            {"prompt_len": 1},
            r"has shape \(3, 2\), expected \[tokens, layers, picks\]; picks of one layer need an axis",
        ),
        (picks(4).astype(np.float32), {"prompt_len": 1}, "has dtype float32"),
        (np.zeros((4, 3, 2), np.int32), {"prompt_len": 1}, "every layer holds the filler"),
        (picks(4)[:0], {"prompt_len": 0}, "holds no picks"),
        (np.full((4, 3, 2), 5), {"prompt_len": 1}, "picks expert 5 twice"),
        (picks(4).astype(np.int64) + 2**40, {"prompt_len": 1}, "num_experts is "),
        (np.array([{}], object), {"prompt_len": 1}, "pickled Python objects"),
    ],
)
def test_broken_arrays_are_refused(tmp_path: Path, ids: Any, options: dict[str, Any], message: str) -> None:
    np.save(tmp_path / "r.npy", ids, allow_pickle=True)
    with pytest.raises(TraceError, match=message) as caught:
        RoutingTrace.from_vllm(tmp_path / "r.npy", **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "holds no requests"),
        ([{"routed_experts": None}], "request 0 is .* expected an object with routed_experts"),
        ([{"routed_experts": [[1], [1, 2]]}], "routed_experts is no array"),
        ([{"routed_experts": [[[0, 10**17]]], "prompt_len": 1}], "num_experts is "),
        ([{"routed_experts": [[[0, 1]]], "prompt_len": 1.5}], "prompt_len is 1.5"),
        ([{"routed_experts": [[[0, 1]]], "prompt_token_ids": 3}], "prompt_token_ids is 3, expected a list"),
        ([{"routed_experts": [[[0, 1]]], "prompt_len": 2}], "prompt_len of sequence 0 is 2, allowed are 0..1"),
    ],
)
def test_broken_requests_are_refused(tmp_path: Path, document: Any, message: str) -> None:
    (tmp_path / "r.json").write_text(json.dumps(document))
    with pytest.raises(TraceError, match=message) as caught:
        RoutingTrace.from_vllm(tmp_path / "r.json")
    assert "r.json" in str(caught.value)


# ---- JSON lines ----


def route(token: int, ids: Any, layer: int = 1, request: str = "r0", weights: Any = (0.6, 0.4)) -> dict[str, Any]:
    line = {"type": "route", "req_id": request, "token_idx": token, "layer": layer, "topk_ids": ids}
    return line if weights is None else {**line, "topk_weights": list(weights)}


def write(folder: Path, lines: list[Any], meta: dict[str, Any] | None = None) -> Path:
    first = {"type": "meta", "model_id": "toy-moe", "vllm_version": "0.1", "top_k": 2, "layers_logged": [1]}
    rows = [first if meta is None else {"type": "meta", **meta}, *lines]
    file = folder / "routes.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_calls_of_requests_served_one_by_one_show_the_phases(tmp_path: Path) -> None:
    ids = [[0, 1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 0], [0, 2]]
    counters = [0, 1, 2, 0, 0, 0, 1]  # a prompt of three, two steps, a prompt of two
    lines = [route(t, one, layer=layer) for layer in (1, 4) for t, one in zip(counters, ids, strict=True)]
    file = write(tmp_path, lines, {"model_id": "toy-moe", "top_k": 2, "num_experts": 8, "vllm_version": "0.1"})
    assert list(recognise(file)) == ["vllm-jsonl"]
    trace = RoutingTrace.from_vllm_jsonl(file)
    assert trace.sequence_offsets.tolist() == [0, 5, 7]
    assert trace.prompt_len.tolist() == [3, 2]
    assert trace.layer_index.tolist() == [1, 4]
    np.testing.assert_array_equal(trace.topk_ids[:, 0], ids)
    np.testing.assert_array_equal(trace.topk_ids[:, 1], ids)
    assert trace.topk_weights is not None
    np.testing.assert_allclose(trace.topk_weights[:, 0], np.tile([0.6, 0.4], (7, 1)), rtol=1e-7, atol=0)
    assert trace.num_experts == 8
    assert trace.metadata["model"] == "toy-moe"
    assert trace.metadata["vllm_version"] == "0.1"


def test_requests_named_by_call_or_by_request(tmp_path: Path) -> None:
    by_call = [route(t, [t % 2, 2], request=f"call_{c}") for t, c in enumerate([1, 1, 1, 2, 3, 4, 4, 5])]
    trace = RoutingTrace.from_vllm_jsonl(write(tmp_path, by_call))
    assert trace.sequence_offsets.tolist() == [0, 5, 8]
    assert trace.prompt_len.tolist() == [3, 2]
    by_request = [route(t, [0, 1], request=r) for r in "ab" for t in (0, 1, 0, 0)]
    trace = RoutingTrace.from_vllm_jsonl(write(tmp_path, by_request))
    assert trace.sequence_offsets.tolist() == [0, 4, 8]
    assert trace.prompt_len.tolist() == [2, 2]


def test_a_counter_that_runs_on_leaves_the_phases_to_the_user(tmp_path: Path) -> None:
    file = write(tmp_path, [route(t, [0, 1], weights=None) for t in range(6)])
    with pytest.raises(TraceError, match="prompt_len"):
        RoutingTrace.from_vllm_jsonl(file)
    trace = RoutingTrace.from_vllm_jsonl(file, prompt_len=1, sequence_len=3)
    assert trace.sequence_offsets.tolist() == [0, 3, 6]
    assert trace.prompt_len.tolist() == [1, 1]
    assert trace.topk_weights is None


def test_lines_of_several_ranks(tmp_path: Path) -> None:
    lines = [route(t, [t, t + 1]) for t in range(4) for _ in range(2)]
    file = write(tmp_path, lines)
    kept = import_files("vllm-jsonl", [file], ImportOptions(prompt_len=(4,)))
    assert isinstance(kept.result, RoutingTrace)
    assert kept.result.num_tokens == 8
    first = kept.findings[0]
    assert (first.defect, first.mended) == ("duplicate-tokens", False)
    assert "4 of 8 tokens" in first.found
    mended = import_files("vllm-jsonl", [file], ImportOptions(prompt_len=(2,), mend=frozenset({"duplicate-tokens"})))
    assert isinstance(mended.result, RoutingTrace)
    assert mended.result.topk_ids[:, 0, 0].tolist() == [0, 1, 2, 3]
    assert mended.findings[0].mended


def test_equal_picks_of_decode_steps_are_no_copies(tmp_path: Path) -> None:
    file = write(tmp_path, [route(t, [0, 1]) for t in (0, 1, 0, 0, 0)])
    assert RoutingTrace.from_vllm_jsonl(file).sequence_lengths.tolist() == [5]


def test_the_profiler_of_generated_tokens(tmp_path: Path) -> None:
    rows = [
        {"dataset": "d", "problem_id": p, "layer": layer, "token_idx": t, "experts": [t, 7], "gating_probs": [0.7, 0.3]}
        for p in (3, 5)
        for t in range(2)
        for layer in (0, 1)
    ]
    file = tmp_path / "p.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    assert list(recognise(file)) == ["vllm-jsonl"]
    trace = RoutingTrace.from_vllm_jsonl(file)
    assert trace.sequence_lengths.tolist() == [2, 2]
    assert trace.prompt_len.tolist() == [0, 0]
    assert trace.topk_ids[:, 1, 0].tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            [route(0, [0, 1]), {"type": "meta"}],
            "line 3: a meta line that says nothing for model_id, where the first says 'toy-moe'",
        ),
        ([], "holds no lines with picks"),
        ([route(0, [0, 1, 2])], "line 2: topk_ids has 3 picks, expected 2"),
        ([route(0, [])], r"line 2: topk_ids is \[\], expected a list"),
        ([route(0, 3)], "line 2: topk_ids is 3"),
        ([route(0, [0, 1.0])], r"line 2: a pick of topk_ids is 1\.0"),
        ([route(0, [0, -2])], "line 2: a pick of topk_ids is -2"),
        ([route(0, [0, 10**12])], "line 2: a pick of topk_ids is 1000000000000"),
        ([route(0, [0, True])], "line 2: a pick of topk_ids is True"),
        ([route(-1, [0, 1])], "line 2: token_idx is -1"),
        ([route(0, [0, 1], layer=-1)], "line 2: layer is -1"),
        ([route(0, [0, 1], weights=[0.5])], r"line 2: topk_weights is \[0\.5\], expected 2 numbers"),
        ([route(0, [0, 1], weights=["a", 1])], "line 2: topk_weights is"),
        ([route(0, [0, 1]), route(1, [0, 1], weights=None)], "line 3: topk_weights is on some lines only"),
        ([route(0, [0, 1], weights=None), route(1, [0, 1])], "line 3: topk_weights is on some lines only"),
        ([route(0, [0, 1]), route(0, [0, 1], layer=2), route(1, [0, 1])], "layer 2 has 1 tokens .* layer 1 has 2"),
        (
            [route(0, [0, 1]), route(0, [0, 1], layer=2, request="x")],
            "line 3: layer 2 has token_idx 0 of another request where",
        ),
        ([{"type": "route", "token_idx": 0, "topk_ids": [0, 1]}], "line 2: lacks 'layer'"),
        ([route(0, [0, 1], request=[1])], r"line 2: req_id is \[1\]"),  # type: ignore[arg-type]
        ([route(t, [1, 1]) for t in (0, 1, 0)], "picks expert 1 twice"),
        ([3], "line 2 is 3, expected an object"),
        ([route(t, [0, 1]) for t in (0, 0, 1)], "starts with a forward call of one token"),
        (
            [route(t, [0, 1]) for t in (0, 1, 0, 0, 1, 0, 1)],
            "calls of 2 and 2 tokens follow each other: one prompt that was read in pieces",
        ),
        ([route(t, [0, 1], request=r) for r in "ab" for t in (0, 1, 0, 0, 1)], "a request has a second forward call"),
        ([route(0, [0, 1], request=r) for r in "abab"], "requests take turns|--prompt-len"),
    ],
)
def test_broken_lines_are_refused(tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(TraceError, match=message) as caught:
        RoutingTrace.from_vllm_jsonl(write(tmp_path, lines))
    assert "routes.jsonl" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"type": "meta", "top_k": 2}\n{"a": 1, "a": 2}\n', "line 2: key 'a' occurs twice"),
        ('{"type": "meta", "top_k": 2}\n{"a": NaN}\n', "line 2: holds NaN"),
        ('{"type": "meta", "top_k": 2}\n{"a": 1e400}\n', "line 2: holds 1e400"),
        ('{"type": "meta", "top_k": 2}\n{"a": ' + "9" * 50 + "}\n", "line 2: holds an integer of 50 digits"),
        ('{"type": "meta", "top_k": 2}\n' + "[" * 100_000 + "\n", "line 2: is nested too deeply"),
        ('{"type": "meta", "top_k": 2}\n{"a": \n', "line 2: is no JSON"),
        ('{"type": "meta", "top_k": 2}\n\0\n', "line 2 holds the byte zero"),
        ('{"type": "meta", "top_k": -2}\n', "line 1: top_k is -2"),
    ],
)
def test_broken_text_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "r.jsonl").write_text(text)
    with pytest.raises(TraceError, match=message):
        RoutingTrace.from_vllm_jsonl(tmp_path / "r.jsonl")


@given(st.lists(st.tuples(st.integers(2, 5), st.integers(1, 4)), min_size=1, max_size=5), st.booleans())
def test_phases_are_those_of_the_requests_served(requests: list[tuple[int, int]], by_request: bool) -> None:
    tokens, names = [], []
    for number, (prompt, steps) in enumerate(requests):
        tokens += [*range(prompt), *[0] * steps]
        names += [number if by_request else 0] * (prompt + steps)
    lengths, prompts = phases_of_calls(np.array(tokens), np.array(names), ImportOptions(), "log")
    assert lengths.tolist() == [prompt + steps for prompt, steps in requests]
    assert prompts.tolist() == [prompt for prompt, _ in requests]


# ---- ids without a sign ----

UNSIGNED = ("u1", "u2", "u4", "u8", ">u2")


@pytest.mark.parametrize("dtype", UNSIGNED)
@pytest.mark.parametrize("name", ["a.npy", "a.npz"])
def test_ids_of_unsigned_types_have_no_mark_of_none(tmp_path: Path, dtype: str, name: str) -> None:
    """255 of 256 experts is one like any other; so is the largest of every other type, where it is a number at all."""
    rng = np.random.default_rng(3)
    ids = rng.permuted(np.tile(np.arange(256), (40, 3, 1)), axis=2)[:, :, :8]
    ids[0, 0, 0] = 255
    ids[0, 0, 1:] = np.arange(7)
    ids[:, 1] = 0
    (np.save if name == "a.npy" else np.savez)(tmp_path / name, ids.astype(dtype))  # type: ignore[operator]
    for said in ({}, {"num_experts": 256}):
        found = import_files("vllm", [tmp_path / name], ImportOptions(prompt_len=(10,), **said))
        assert isinstance(found.result, RoutingTrace)
        np.testing.assert_array_equal(found.result.topk_ids, ids[:, [0, 2]])
        assert found.result.num_experts == 256
    ids[5] = 0  # a row that was never written, among others
    memory = RoutingTrace.from_vllm(ids.astype(dtype), prompt_len=10)
    assert (memory.topk_ids[5] == memory.unassigned).all()
    assert memory.topk_ids[0, 0, 0] == 255


def test_ids_beyond_every_signed_type_are_refused() -> None:
    with pytest.raises(TraceError, match="holds 18446744073709551615, which is too large"):
        RoutingTrace.from_vllm(np.full((3, 2, 2), 2**64 - 1, np.uint64), prompt_len=1)


# ---- prompts that are stated twice ----


@pytest.mark.parametrize("kind", ["json", "npz"])
def test_a_prompt_length_that_contradicts_the_file_is_refused(tmp_path: Path, kind: str) -> None:
    ids = picks(6)
    file = tmp_path / f"a.{kind}"
    if kind == "json":
        file.write_text(json.dumps({"routed_experts": ids.tolist(), "prompt_token_ids": [7, 8, 9]}))
    else:
        np.savez(file, routed_experts_0=ids, prompt_len=[3])
    assert RoutingTrace.from_vllm(file, prompt_len=3).prompt_len.tolist() == [3]
    with pytest.raises(TraceError, match=r"says that sequence 0 has 3 prompt rows, prompt_len says 4"):
        RoutingTrace.from_vllm(file, prompt_len=4)


def test_messages_do_not_print_what_is_long(tmp_path: Path) -> None:
    ids = picks(30)
    np.savez(tmp_path / "a.npz", routed_experts=ids, prompt_len=np.arange(20))
    with pytest.raises(TraceError, match=r"prompt_len is an array \(20,\) of int64, expected an integer >= 0"):
        RoutingTrace.from_vllm(tmp_path / "a.npz")
    (tmp_path / "a.json").write_text(json.dumps([{"meta_info": {"routed_experts": "QUJD" * 99}, "text": "x"}]))
    with pytest.raises(TraceError, match="request 0 is an object with meta_info, text, expected an object with routed"):
        RoutingTrace.from_vllm(tmp_path / "a.json", prompt_len=1)


# ---- prompts in several calls, and loggers that begin anew ----


def calls(*sizes: int, alike: int = 0) -> list[dict[str, Any]]:
    """Lines of forward calls of one layer, whose counter starts anew; rows of the first ``alike`` calls are all one."""
    ids = np.argsort(np.random.default_rng(1).random((sum(sizes), EXPERTS)), axis=1)[:, :TOP_K].tolist()
    lines, at = [], 0
    for number, size in enumerate(sizes):
        lines += [route(t, ids[at if number < alike else at + t]) for t in range(size)]
        at += size
    return lines


def test_a_prompt_in_pieces_needs_its_length(tmp_path: Path) -> None:
    file = write(tmp_path, calls(8, 8, 4, 1, 1, 1))
    with pytest.raises(
        TraceError, match="calls of 8 and 8 tokens follow each other: one prompt that was read in pieces"
    ):
        RoutingTrace.from_vllm_jsonl(file)
    trace = RoutingTrace.from_vllm_jsonl(file, prompt_len=20)
    assert (trace.sequence_lengths.tolist(), trace.prompt_len.tolist()) == ([23], [20])
    with pytest.raises(TraceError, match="prompt_len is 18 for sequence 0, which ends within a forward call"):
        RoutingTrace.from_vllm_jsonl(file, prompt_len=18)
    several = write(tmp_path, calls(8, 4, 1, 1, 6, 1))
    trace = RoutingTrace.from_vllm_jsonl(several, prompt_len=[12, 6])
    assert (trace.sequence_lengths.tolist(), trace.prompt_len.tolist()) == ([14, 7], [12, 6])
    # The last piece may be a call of one token.
    assert RoutingTrace.from_vllm_jsonl(write(tmp_path, calls(8, 8, 1, 1, 1)), prompt_len=17).num_sequences == 1


def test_trial_runs_are_kept_apart_from_the_first_prompt(tmp_path: Path) -> None:
    trace = RoutingTrace.from_vllm_jsonl(write(tmp_path, calls(70, 70, 5, 1, 1, alike=2)))
    assert trace.sequence_lengths.tolist() == [70, 70, 7]
    assert trace.prompt_len.tolist() == [70, 70, 5]


def test_meta_lines_that_say_the_same_start_forward_calls(tmp_path: Path) -> None:
    meta = {"type": "meta", "model_id": "toy-moe", "vllm_version": "0.1", "top_k": 2, "layers_logged": [1]}
    ids = picks(6)[:, 0].tolist()
    lines: list[dict[str, Any]] = []
    for start, stop in ((0, 4), (4, 5), (5, 6)):  # the counter runs on, so that only the meta lines part the calls
        lines += [meta, *(route(t, ids[t]) for t in range(start, stop))]
    trace = RoutingTrace.from_vllm_jsonl(write(tmp_path, lines))
    assert (trace.sequence_lengths.tolist(), trace.prompt_len.tolist()) == ([6], [4])
    np.testing.assert_array_equal(trace.topk_ids[:, 0], ids)
    lines[-2] = {**meta, "model_id": "other"}
    with pytest.raises(TraceError, match="a meta line that says 'other' for model_id, where the first says 'toy-moe'"):
        RoutingTrace.from_vllm_jsonl(write(tmp_path, lines))


# ---- the same tokens in every layer, and all of them ----


def several(**requests: int) -> list[tuple[str, int]]:
    """Tokens of requests one after another."""
    return [(name, t) for name, count in requests.items() for t in range(count)]


def logged(tokens: list[tuple[str, int]], layers: tuple[int, ...] = (1, 2)) -> list[dict[str, Any]]:
    """Lines of tokens, layer after layer; picks tell request, token and layer."""
    return [
        route(t, [8 * (ord(name) % 8) + t, 64 + layer], layer=layer, request=name)
        for layer in layers
        for name, t in tokens
    ]


META = {"model_id": "toy-moe", "top_k": 2, "num_experts": 128}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda rows: [*rows[:4], rows[5], rows[4], *rows[6:]],
            "line 6: layer 2 has token_idx 1 where layer 1 has token",
        ),
        (lambda rows: [*rows[:5], rows[6], *rows[6:]], "line 7: layer 2 has token_idx 2 where layer 1 has token_idx 1"),
        (lambda rows: [row for row in rows if row["token_idx"] != 2], "line 4: token_idx 3 after 1: tokens between"),
        (lambda rows: [row for row in rows if row["token_idx"] > 1], "line 2: token_idx 2 at the start of a request"),
        (lambda rows: rows[:-1], r"layer 2 has 3 tokens \(the last on line 8\), layer 1 has 4"),
    ],
)
def test_tokens_are_the_same_in_every_layer_and_all_are_there(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        RoutingTrace.from_vllm_jsonl(write(tmp_path, change(logged(several(a=4))), META), prompt_len=2)


def test_layers_that_are_announced_are_there(tmp_path: Path) -> None:
    file = write(tmp_path, logged(several(a=4)), {**META, "layers_logged": [1, 2, 3]})
    with pytest.raises(TraceError, match="announces 3 layers in layers_logged, of which 3 has no line"):
        RoutingTrace.from_vllm_jsonl(file, prompt_len=2)
    file = write(tmp_path, logged(several(a=4)), {**META, "layers_logged": "all"})
    assert RoutingTrace.from_vllm_jsonl(file, prompt_len=2).num_layers == 2


def test_requests_that_take_turns_are_put_one_after_another(tmp_path: Path) -> None:
    turns = [("a", 0), ("a", 1), ("b", 0), ("a", 2), ("b", 1), ("c", 0), ("a", 3), ("b", 2), ("c", 1)]
    file = write(tmp_path, logged(turns), META)
    with pytest.raises(TraceError, match="prompt_len"):
        RoutingTrace.from_vllm_jsonl(file)
    trace = RoutingTrace.from_vllm_jsonl(file, prompt_len=[2, 1, 1])
    apart = RoutingTrace.from_vllm_jsonl(write(tmp_path, logged(several(a=4, b=3, c=2)), META), prompt_len=[2, 1, 1])
    np.testing.assert_array_equal(trace.topk_ids, apart.topk_ids)
    assert trace.sequence_offsets.tolist() == [0, 4, 7, 9]
    file = write(tmp_path, logged(turns), META)
    assert RoutingTrace.from_vllm_jsonl(file, prompt_len=1, sequence_len=[4, 3, 2]).num_sequences == 3
    for lengths in ([3, 4, 2], 4, 3, [7, 2], [4, 5]):
        with pytest.raises(TraceError, match="sequence_len"):
            RoutingTrace.from_vllm_jsonl(file, prompt_len=1, sequence_len=lengths)
    again = write(tmp_path, logged([("a", 0), ("b", 0), ("a", 0)]), META)
    with pytest.raises(
        TraceError, match="line 4: the lines of several requests take turns, and token_idx 0 does not go"
    ):
        RoutingTrace.from_vllm_jsonl(again, prompt_len=1, sequence_len=1)


def test_lengths_may_join_calls_and_not_cut_requests(tmp_path: Path) -> None:
    file = write(tmp_path, logged(several(a=3, b=1, c=1, d=2)), META)
    trace = RoutingTrace.from_vllm_jsonl(file, prompt_len=[3, 2], sequence_len=[5, 2])
    assert trace.sequence_offsets.tolist() == [0, 5, 7]
    with pytest.raises(TraceError, match=r"sequence 0 would end after row 2, within a request; .* rows 3, 4, 5, 7"):
        RoutingTrace.from_vllm_jsonl(file, prompt_len=1, sequence_len=[2, 5])


@pytest.mark.parametrize(
    "lines",
    [
        [{"token_idx": 0, "layer": 0, "experts": [1, 2], "text": "x"}] * 2,
        [{"token_idx": 0, "layer": "a", "topk_ids": [1, 2]}] * 2,
        [{"type": "meta", "model_id": "gpt"}, {"role": "user", "content": "x"}],
        [{"type": "meta", "top_k": 2}, {"type": "meta", "top_k": 2}],
    ],
)
def test_other_logs_are_left_alone(tmp_path: Path, lines: list[Any]) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert recognise(tmp_path / "a.jsonl") == {}


# ---- requests as people save them ----


SIZES = [(5 + i, 2 + i % 3) for i in range(12)]


def saved_requests() -> tuple[dict[str, NDArray[np.int32]], list[int]]:
    """Twelve requests in the order of their names as text, 10 before 2, and their prompts by number."""
    every = {f"routed_experts_{i}": picks(rows, seed=i) for i, (rows, _) in enumerate(SIZES)}
    return {key: every[key] for key in sorted(every)}, [prompt for _, prompt in SIZES]


@pytest.mark.parametrize("key", ["prompt_len", "prompt_lens", "prompt_lengths", "num_prompt_tokens"])
def test_prompts_are_paired_by_number(tmp_path: Path, key: str) -> None:
    arrays, prompts = saved_requests()
    file = tmp_path / "a.npz"
    np.savez(file, **arrays, **{key: np.array(prompts)})
    trace = RoutingTrace.from_vllm(file)
    assert trace.prompt_len.tolist() == prompts
    assert trace.sequence_lengths.tolist() == [rows for rows, _ in SIZES]
    np.testing.assert_array_equal(trace.topk_ids, np.concatenate([arrays[f"routed_experts_{i}"] for i in range(12)]))
    each = {f"prompt_token_ids_{i}": np.arange(p) for i, p in reversed(list(enumerate(prompts)))}
    np.savez(file, **arrays, **each)
    assert list(recognise(file)) == ["vllm"]
    np.testing.assert_array_equal(RoutingTrace.from_vllm(file).topk_ids, trace.topk_ids)
    assert RoutingTrace.from_vllm(file).prompt_len.tolist() == prompts


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tokens_in": np.arange(12)}, r"holds 'tokens_in' of shape \(12,\) beside the picks; allowed: .* prompt_len"),
        ({"prompt_len_0": np.array(2)}, "routed_experts_1 has 0 lengths of its prompt"),
        ({"prompt_len": np.arange(3)}, r"prompt_len is an array \(3,\) of int64, expected 12 integers"),
        ({"routed_experts_007": picks(4)}, "routed_experts_007 and routed_experts_7 are both number 7"),
    ],
)
def test_other_arrays_beside_the_picks_are_named(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "a.npz", **saved_requests()[0], **more)
    with pytest.raises(TraceError, match=message):
        import_files("auto", [tmp_path / "a.npz"], ImportOptions(prompt_len=(1,)))


def test_a_batch_needs_the_rows_of_each_request(tmp_path: Path) -> None:
    parts = [picks(5, seed=1), picks(3, seed=2)]
    batch = np.full((2, 5, 3, TOP_K), -1)
    for i, part in enumerate(parts):
        batch[i, : len(part)] = part
    np.save(tmp_path / "a.npy", batch)
    np.savez(tmp_path / "b.npz", routed_experts=batch, prompt_len=[4, 2])
    for source in (tmp_path / "a.npy", tmp_path / "b.npz", batch):
        with pytest.raises(TraceError, match="a batch of 2 requests; sequence_len says the rows of each"):
            RoutingTrace.from_vllm(source, prompt_len=[4, 2])
        trace = RoutingTrace.from_vllm(source, prompt_len=[4, 2], sequence_len=[5, 3])
        np.testing.assert_array_equal(trace.topk_ids, np.concatenate(parts))
        with pytest.raises(TraceError, match="sequence_len is 4 for request 0 of a batch of 5 rows each"):
            RoutingTrace.from_vllm(source, prompt_len=[4, 2], sequence_len=[4, 3])


def test_lists_in_memory_are_requests() -> None:
    parts = [picks(5, seed=1), picks(5, seed=2)]
    for source in (parts, tuple(parts), [one.tolist() for one in parts]):
        trace = RoutingTrace.from_vllm(source, prompt_len=[4, 2])
        np.testing.assert_array_equal(trace.topk_ids, np.concatenate(parts))
        assert trace.prompt_len.tolist() == [4, 2]
    assert RoutingTrace.from_vllm(parts[0].tolist(), prompt_len=4).num_sequences == 1
    with pytest.raises(TraceError, match="sequence_len is 4 for sequence 0, whose array has 5 rows"):
        RoutingTrace.from_vllm(parts, prompt_len=1, sequence_len=[4, 6])


@pytest.mark.parametrize("kind", ["json", "jsonl"])
def test_outputs_of_a_request(tmp_path: Path, kind: str) -> None:
    parts = [picks(6, seed=1), picks(5, seed=2)]
    answers = [
        {"prompt_token_ids": [7] * 3, "outputs": [{"routed_experts": one.tolist(), "token_ids": [1] * (len(one) - 2)}]}
        for one in parts
    ]
    answers[0]["outputs"] += answers[1]["outputs"]
    file = tmp_path / f"a.{kind}"
    file.write_text(json.dumps(answers) if kind == "json" else "\n".join(map(json.dumps, answers)))
    assert list(recognise(file)) == ["vllm"]
    trace = RoutingTrace.from_vllm(file)
    np.testing.assert_array_equal(trace.topk_ids, np.concatenate([*parts, parts[1]]))
    assert trace.prompt_len.tolist() == [3, 3, 3]
    answers[0]["prompt_token_ids"] = [7] * 2
    answers[0]["prompt_len"] = 3
    file.write_text(json.dumps(answers) if kind == "json" else "\n".join(map(json.dumps, answers)))
    with pytest.raises(TraceError, match="prompt_token_ids says 2 prompt tokens, prompt_len says 3"):
        RoutingTrace.from_vllm(file)
    del answers[0]["prompt_len"]
    answers[0]["outputs"][0]["token_ids"] = [1, 2]  # type: ignore[index]
    file.write_text(json.dumps(answers[:1]))
    with pytest.raises(TraceError, match="rows of 6 tokens, for 2 of the prompt and 2 of the output; expected 3 or 4"):
        RoutingTrace.from_vllm(file)
