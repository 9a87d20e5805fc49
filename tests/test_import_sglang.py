"""SGLang: dumps of its recorder per token and as counts, and responses with routed experts."""

import base64
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
from perfmodel.routing.importers.requests import Pass, rows_of, rows_one_by_one
from perfmodel.routing.profile import FrequencyProfile

LAYERS, SLOTS, TOP_K = 3, 8, 2
#: Slots 6 and 7 hold copies of experts 0 and 2; layer 2 has its experts in another order.
MAP = np.array([[0, 1, 2, 3, 4, 5, 0, 2]] * 2 + [[5, 4, 3, 2, 1, 0, 5, 3]])


def record(tokens: int, positions: list[int], mode: int, lengths: list[int] | None, seed: int = 0) -> dict[str, Any]:
    """A forward pass as the recorder keeps it: layer first, eight columns, layer 0 without experts."""
    rng = np.random.default_rng(seed)
    ids = np.full((LAYERS, tokens, 8), -1, np.int32)
    for layer in range(1, LAYERS):
        for t in range(tokens):
            ids[layer, t, :TOP_K] = rng.permutation(6)[:TOP_K]  # the slots of six different experts
    return {
        "forward_pass_id": seed,
        "rank": 0,
        "gatherer_key": "primary",
        "input_ids": list(range(tokens)),
        "positions": positions,
        "extend_seq_lens": lengths,
        "forward_mode": mode,
        "topk_ids_of_layer": ids,
        "misc_objects": [],
        "global_physical_count": np.zeros((LAYERS, SLOTS), np.int32),
    }


def dump(*records: dict[str, Any], mapping: Any = MAP) -> dict[str, Any]:
    return {"records": list(records), "last_physical_to_logical_map": mapping}


def write(folder: Path, document: Any, name: str = "dump.json") -> Path:
    file = folder / name
    file.write_text(json.dumps(document, default=lambda array: array.tolist()))
    return file


#: Two prompts, of which the second comes with a token in the server's cache, and steps until the first ends.
STEPS = (
    record(5, [0, 1, 2, 1, 2], 1, [3, 2], seed=1),
    record(2, [3, 3], 2, None, seed=2),
    record(0, [], 4, None, seed=3),
    record(2, [4, 4], 2, None, seed=4),
)


def test_a_dump_per_token(tmp_path: Path) -> None:
    file = write(tmp_path, dump(*STEPS))
    assert list(recognise(file)) == ["sglang"]
    found = import_files("auto", [file])
    trace = found.result
    assert isinstance(trace, RoutingTrace)
    assert trace.sequence_lengths.tolist() == [5, 4]
    assert trace.prompt_len.tolist() == [3, 2]
    assert trace.layer_index.tolist() == [1, 2]
    assert trace.top_k == TOP_K
    assert trace.num_experts == 6
    assert not trace.num_experts_inferred
    assert trace.metadata["cached_prompt_tokens"] == 1
    first, second, _, third = (one["topk_ids_of_layer"] for one in STEPS)
    slots = np.concatenate(
        [first[1:, :3], second[1:, :1], third[1:, :1], first[1:, 3:], second[1:, 1:], third[1:, 1:]], axis=1
    )[:, :, :TOP_K]
    expected = np.stack([MAP[layer + 1][slots[layer]] for layer in range(2)], axis=1)
    np.testing.assert_array_equal(trace.topk_ids, expected)
    (physical,) = [one for one in found.findings if one.defect == "physical-ids"]
    assert physical.mended
    assert "8 slots" in physical.found


def test_the_same_content_as_arrays(tmp_path: Path) -> None:
    arrays = {"last_physical_to_logical_map": MAP}
    for i, one in enumerate(STEPS):
        for key in ("input_ids", "positions", "forward_mode", "topk_ids_of_layer", "extend_seq_lens"):
            if one[key] is not None:
                arrays[f"records/{i}/{key}"] = np.array(one[key], np.int32)
    np.savez(tmp_path / "dump.npz", **arrays)  # type: ignore[arg-type]
    assert list(recognise(tmp_path / "dump.npz")) == ["sglang"]
    trace = RoutingTrace.from_sglang(tmp_path / "dump.npz")
    np.testing.assert_array_equal(trace.topk_ids, RoutingTrace.from_sglang(write(tmp_path, dump(*STEPS))).topk_ids)


def test_another_map_and_no_map(tmp_path: Path) -> None:
    file = write(tmp_path, dump(*STEPS))
    other = np.arange(SLOTS)[None].repeat(LAYERS, axis=0)
    np.save(tmp_path / "map.npy", other)
    found = import_files("sglang", [file], ImportOptions(expert_map=tmp_path / "map.npy"))
    assert isinstance(found.result, RoutingTrace)
    assert found.result.num_experts == SLOTS
    assert not [one for one in found.findings if one.defect == "physical-ids"]
    np.testing.assert_array_equal(found.result.topk_ids[0], STEPS[0]["topk_ids_of_layer"][1:, 0, :TOP_K])


def test_ranks_that_saw_the_same_tokens(tmp_path: Path) -> None:
    files = [write(tmp_path, dump(*STEPS), f"{rank}.json") for rank in range(2)]
    kept = import_files("sglang", files)
    assert isinstance(kept.result, RoutingTrace)
    assert kept.result.num_sequences == 4
    assert [one.mended for one in kept.findings if "another rank" in one.found] == [False]
    mended = import_files("sglang", files, ImportOptions(mend=frozenset({"duplicate-tokens"})))
    assert isinstance(mended.result, RoutingTrace)
    assert mended.result.num_sequences == 2


def changed(**changes: Any) -> dict[str, Any]:
    return dump({**STEPS[0], **changes})


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"records": []}, r"records is \[\], expected a list of forward passes"),
        ([1], "the content is .* expected an object"),
        ({"records": [STEPS[0]]}, "lacks 'last_physical_to_logical_map'"),
        (dump(STEPS[0], mapping=MAP[:2]), "has 3 layers, the map of slots 2"),
        (dump(STEPS[0], mapping=MAP - 1), "holds -1 to 4, expected experts"),
        (dump(STEPS[0], mapping=MAP * 2.5), "has dtype float64"),
        (dump(STEPS[0], mapping=MAP[:, :4] % 4), r"allowed: slots 0\.\.3, or -1"),
        (changed(positions=[0, 1, 3, 1, 2]), "record 0: positions of an extended request do not follow"),
        (changed(positions=[0, 1, 2, 1]), "5 input_ids, 4 positions"),
        (changed(positions=[[0], [1]]), "positions has shape"),
        (changed(extend_seq_lens=[3, 3]), "adds up to 6 tokens, the pass has 5"),
        (changed(extend_seq_lens=[6, -1]), "adds up to 5"),
        (changed(extend_seq_lens=None), "adds up to 0"),
        (changed(forward_mode=5), r"forward_mode is 5; allowed: 1 \(extend\)"),
        (changed(forward_mode="extend"), "forward_mode is 'extend'"),
        (changed(forward_mode=2), "decodes at positions that follow no running request"),
        (changed(topk_ids_of_layer=STEPS[0]["topk_ids_of_layer"].transpose(1, 0, 2)), "layers come first"),
        (changed(topk_ids_of_layer=STEPS[0]["topk_ids_of_layer"] + 0.5), "has dtype float64"),
        (changed(topk_ids_of_layer=np.full((3, 5, 8), -1)), "holds no picks"),
        (changed(topk_ids_of_layer=np.full((3, 5, 8), -2)), "holds -2 to -2"),
        (changed(topk_ids_of_layer=np.zeros((3, 5, 2), int)), "picks expert 0 twice"),
        (dump({k: v for k, v in STEPS[0].items() if k != "topk_ids_of_layer"}), "format sglang-stat"),
        (dump(STEPS[2]), "holds no tokens"),
    ],
)
def test_broken_dumps_are_refused(tmp_path: Path, document: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message) as caught:
        RoutingTrace.from_sglang(write(tmp_path, document))
    assert "dump.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_requests_that_cannot_be_told_apart(tmp_path: Path) -> None:
    steps = (record(4, [0, 1, 0, 1], 1, [2, 2], seed=1), record(1, [2], 2, None, seed=2))
    with pytest.raises(TraceError, match="record 1: a request ended while another was at the same position"):
        RoutingTrace.from_sglang(write(tmp_path, dump(*steps)))


# ---- a server, played step by step ----


class Server:
    """The order in which SGLang keeps requests, with picks that number the tokens of all requests.

    Prompts join behind those that run. A mixed pass reads prompts and lets every running request decode, in this
    order, and what runs from then on is that pass's batch; a prompt that is not at its end yet joins when it is.
    """

    def __init__(self) -> None:
        self.passes: list[Pass] = []
        self.every: list[tuple[list[int], int]] = []
        self.running: list[list[int]] = []  # request, next position, steps left
        self.numbers = 0

    def run(self, parts: list[tuple[int, int, int]], extends: list[int], mixed: bool) -> None:
        positions: list[int] = []
        first = self.numbers
        for request, start, size in parts:
            self.every[request][0].extend(range(self.numbers, self.numbers + size))
            positions += range(start, start + size)
            self.numbers += size
        ids = np.arange(first, self.numbers, dtype=np.int32)[None, :, None]
        self.passes.append(Pass("step", ids, np.array(positions), np.zeros(len(positions), np.int64), extends, mixed))

    def decoded(self) -> tuple[list[tuple[int, int, int]], list[list[int]]]:
        """What running requests put into a pass, and those that run on after it."""
        return [(r, at, 1) for r, at, _ in self.running], [[r, at + 1, n - 1] for r, at, n in self.running if n > 1]

    def decode(self) -> None:
        if self.running:
            parts, running = self.decoded()
            self.run(parts, [], False)
            self.running = running

    def extend(self, parts: list[tuple[int, int, int]], joining: list[list[int]], mixed: bool) -> None:
        mixed = mixed and bool(self.running)
        steps, running = self.decoded() if mixed else ([], self.running)
        every = parts + steps
        self.run(every, [size for _, _, size in every], mixed)
        begun = [one for one in joining if one[2]]
        self.running = [*begun, *running] if mixed else [*running, *begun]


@st.composite
def schedules(draw: st.DrawFn, apart: bool) -> Server:
    """A server's passes; where ``apart``, no two requests ever stand at the same position."""
    server = Server()
    for _ in range(draw(st.integers(1, 6))):
        parts, begun = [], []
        for _ in range(draw(st.integers(1, 3))):
            number = len(server.every)
            prompt = 20 * (number + 1) if apart else draw(st.integers(2, 6))
            cached = draw(st.integers(0, 3)) if apart else 0
            server.every.append(([], prompt))
            begun.append([number, cached + prompt, draw(st.integers(0, 6))])
            parts.append((number, cached, prompt))
        request, first, size = parts.pop()
        cut = draw(st.integers(1, size))
        if cut < size:
            server.extend([*parts, (request, first, cut)], begun[:-1], draw(st.booleans()))
            server.extend([(request, first + cut, size - cut)], begun[-1:], draw(st.booleans()))
        else:
            server.extend([*parts, (request, first, size)], begun, draw(st.booleans()))
        for _ in range(draw(st.integers(0, 4))):
            server.decode()
    return server


def told(server: Server) -> tuple[list[list[int]], list[int]]:
    found = rows_of(server.passes, "dump")
    ids: NDArray[np.int32] = np.concatenate([one.ids for one in server.passes], axis=1)[0, found.order, 0]
    return [one.tolist() for one in np.split(ids, np.cumsum(found.lengths)[:-1])], found.prompts


@given(schedules(apart=True))
def test_every_token_goes_to_its_request(server: Server) -> None:
    assert told(server) == ([own for own, _ in server.every], [prompt for _, prompt in server.every])


@given(schedules(apart=False))
def test_requests_at_one_position_are_told_apart_or_refused(server: Server) -> None:
    """Nothing but the order of a pass tells them apart, so that a wrong order swaps their tokens."""
    try:
        found = told(server)
    except TraceError as error:
        if "tell their tokens apart" not in str(error):
            raise
        return
    assert found == ([own for own, _ in server.every], [prompt for _, prompt in server.every])


def test_a_mixed_pass_puts_those_that_it_begins_first() -> None:
    server = Server()
    server.every = [([], 3), ([], 4)]
    server.extend([(0, 0, 3)], [[0, 3, 4]], False)
    server.extend([(1, 0, 4)], [[1, 4, 3]], True)  # request 0 decodes in the same pass, at position 3
    for _ in range(3):
        server.decode()  # both at positions 4, 5, 6
    assert told(server)[0] == [own for own, _ in server.every]
    assert server.every[0][0] == [0, 1, 2, 7, 9, 11, 13]


def test_a_prompt_that_goes_on_does_not_decode_in_the_same_pass() -> None:
    server = Server()
    server.every = [([], 4), ([], 8)]
    server.extend([(0, 0, 4)], [[0, 4, 3]], False)
    server.extend([(1, 0, 2)], [], True)
    server.extend([(1, 2, 3)], [], True)  # ends at position 5, where request 0 decodes
    server.extend([(1, 5, 3)], [[1, 8, 1]], True)
    server.decode()
    assert told(server)[0] == [own for own, _ in server.every]


# ---- one request at a time ----

#: Request 0 ends where the prompt of request 1 ends too.
SERIAL = (
    record(3, [0, 1, 2], 1, [3], seed=1),
    record(1, [3], 2, None, seed=2),
    record(4, [0, 1, 2, 3], 1, [4], seed=3),
    record(1, [4], 2, None, seed=4),
    record(1, [5], 2, None, seed=5),
)


def test_requests_made_one_at_a_time_may_end_at_one_position(tmp_path: Path) -> None:
    file = write(tmp_path, dump(*SERIAL))
    with pytest.raises(TraceError, match=r"if requests were made one at a time, sequence_len .*passes 4,6\)"):
        RoutingTrace.from_sglang(file)
    trace = RoutingTrace.from_sglang(file, sequence_len=[4, 6])
    assert trace.sequence_lengths.tolist() == [4, 6]
    assert trace.prompt_len.tolist() == [3, 4]
    slots = np.concatenate([one["topk_ids_of_layer"][1, :, :TOP_K] for one in SERIAL])
    np.testing.assert_array_equal(trace.topk_ids[:, 0], MAP[1][slots])


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([5, 5], "sequence 0 is not one request with all its rows"),
        ([10], "sequence 0 is not one request with all its rows"),
        ([4, 5], "adds up to 9 rows, the file has 10"),
    ],
)
def test_lengths_that_the_passes_deny(tmp_path: Path, lengths: list[int], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        RoutingTrace.from_sglang(write(tmp_path, dump(*SERIAL)), sequence_len=lengths)


def test_lengths_are_for_requests_made_one_at_a_time(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="record 0: holds several requests; sequence_len is for"):
        RoutingTrace.from_sglang(write(tmp_path, dump(*STEPS)), sequence_len=9)
    files = [write(tmp_path, dump(*SERIAL), f"{rank}.json") for rank in range(2)]
    with pytest.raises(TraceError, match="sequence_len is for requests made one at a time, in one file"):
        RoutingTrace.from_sglang(*files, sequence_len=[4, 6])


def test_long_prompts_of_requests_made_one_at_a_time() -> None:
    passes = [
        Pass("step", np.zeros((1, len(at), 1), np.int32), np.array(at), np.zeros(len(at), int), extends, False)
        for at, extends in (([2, 3], [2]), ([4, 5], [2]), ([6], []), ([0, 1], [2]))
    ]
    found = rows_one_by_one(passes, np.array([5, 2]), "dump")
    assert (found.lengths, found.prompts, found.cached) == ([5, 2], [4, 2], [2, 0])


def test_tokens_from_the_servers_cache_are_a_finding(tmp_path: Path) -> None:
    found = import_files("sglang", [write(tmp_path, dump(*STEPS))]).findings
    (cached,) = [one for one in found if one.defect == "missing-phase"]
    assert "1 tokens at the start of 1 prompt have no rows" in cached.found
    assert cached.mend is None


@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "u8"])
def test_slots_of_unsigned_types(tmp_path: Path, dtype: str) -> None:
    experts = np.arange(256, dtype=dtype)
    ids = np.array([[[255, 0], [7, 255], [1, 2]]], dtype)  # one layer, three tokens
    np.savez(
        tmp_path / "dump.npz",
        **{
            "records/0/input_ids": np.arange(3, dtype=dtype),
            "records/0/positions": np.arange(3, dtype=dtype),
            "records/0/extend_seq_lens": np.array([3], dtype),
            "records/0/forward_mode": np.array(1, dtype),
            "records/0/topk_ids_of_layer": ids,
            "last_physical_to_logical_map": experts[None],
        },  # type: ignore[arg-type]
    )
    trace = RoutingTrace.from_sglang(tmp_path / "dump.npz")
    np.testing.assert_array_equal(trace.topk_ids[:, 0], ids[0])
    np.savez(tmp_path / "stat.npz", logical_count=np.array([[[1, 255], [254, 2]]], dtype))
    np.testing.assert_array_equal(FrequencyProfile.from_sglang_stat(tmp_path / "stat.npz").counts, [[1, 255], [254, 2]])


def test_a_stated_prompt_may_not_be_contradicted(tmp_path: Path) -> None:
    text = base64.b64encode(np.arange(24, dtype="<i4").reshape(6, 2, 2) % 5).decode()
    info = {"routed_experts": text, "prompt_tokens": 4, "completion_tokens": 3}
    file = write(tmp_path, {"meta_info": info}, "answer.json")
    options = {"top_k": 2, "layers": [0, 1]}
    assert RoutingTrace.from_sglang_response(file, prompt_len=4, **options).prompt_len.tolist() == [4]
    with pytest.raises(TraceError, match="says that sequence 0 has 4 prompt rows, prompt_len says 5"):
        RoutingTrace.from_sglang_response(file, prompt_len=5, **options)


def test_a_text_in_place_of_a_list_is_not_printed() -> None:
    with pytest.raises(TraceError, match=r"^found one text of 400 letters, expected a path or a list of base64 texts$"):
        RoutingTrace.from_sglang_response("QUJD" * 100, prompt_len=1)


def test_a_map_names_experts_that_have_a_slot(tmp_path: Path) -> None:
    mapping = np.where(np.arange(SLOTS) == 3, 99, MAP)
    with pytest.raises(TraceError, match="last_physical_to_logical_map names expert 99 for 8 slots a layer"):
        RoutingTrace.from_sglang(write(tmp_path, dump(*STEPS, mapping=mapping)))


# ---- counts ----


def test_counts_of_experts_are_added_over_steps(tmp_path: Path) -> None:
    counts = np.random.default_rng(0).integers(0, 9, (4, 3, 6))
    counts[:, 0] = 0
    file = write(tmp_path, {"rank": 0, "logical_count": counts, "average_utilization_rate_over_window": 0.5})
    assert list(recognise(file)) == ["sglang-stat"]
    profile = import_files("auto", [file, file], ImportOptions(top_k=2)).result
    assert isinstance(profile, FrequencyProfile)
    np.testing.assert_array_equal(profile.counts, 2 * counts.sum(axis=0)[1:])
    assert profile.layer_index.tolist() == [1, 2]
    assert profile.top_k == 2
    assert profile.metadata["source"] == "from-counts"
    np.testing.assert_array_equal(FrequencyProfile.from_sglang_stat(file).counts, counts.sum(axis=0)[1:])


def test_counts_of_slots_become_counts_of_experts(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    slots = [rng.integers(0, 9, MAP.shape) for _ in range(3)]
    file = write(tmp_path, dump(*({"forward_pass_id": i, "global_physical_count": one} for i, one in enumerate(slots))))
    assert list(recognise(file)) == ["sglang-stat"]
    found = import_files("auto", [file])
    expected = np.zeros((3, 6))
    for layer in range(3):
        for slot in range(SLOTS):
            expected[layer, MAP[layer, slot]] += sum(one[layer, slot] for one in slots)
    assert isinstance(found.result, FrequencyProfile)
    np.testing.assert_array_equal(found.result.counts, expected)
    assert found.findings[0].defect == "physical-ids"


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"logical_count": [[-1, 2]]}, "expected counts >= 0"),
        ({"logical_count": [[1.5, 2]]}, "has dtype float64"),
        ({"logical_count": [1, 2]}, "expected 2 axes"),
        ({"logical_count": [[1], [1, 2]]}, "logical_count is no array"),
        ({"logical_count": [[0, 0]]}, "no expert was used"),
        ({"counts": [[0, 0]]}, "lacks 'records'"),
        ({"records": 3, "last_physical_to_logical_map": MAP}, "records is 3"),
        (dump({"global_physical_count": MAP[:, :3]}), r"has shape \(3, 3\), the map of slots \(3, 8\)"),
        (dump({"global": 3}), "record 0: lacks 'global_physical_count'"),
    ],
)
def test_broken_counts_are_refused(tmp_path: Path, document: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message) as caught:
        FrequencyProfile.from_sglang_stat(write(tmp_path, document))
    assert "dump.json" in str(caught.value)


# ---- responses ----


def encoded(ids: NDArray[Any]) -> str:
    return base64.b64encode(ids.astype("<i4").tobytes()).decode()


def response(ids: NDArray[Any], prompt: int | None, output: int | None = None) -> dict[str, Any]:
    info: dict[str, Any] = {"id": "x", "routed_experts": encoded(ids)}
    if prompt is not None:
        info["prompt_tokens"] = prompt
        info["completion_tokens"] = len(ids) + 1 - prompt if output is None else output
    return {"text": "...", "meta_info": info}


def some_ids(tokens: int, seed: int = 0) -> NDArray[np.int64]:
    ids = np.argsort(np.random.default_rng(seed).random((tokens, LAYERS, 6)), axis=2)[:, :, :TOP_K]
    ids[:, 0] = -1
    return ids


@pytest.mark.parametrize("kind", ["json", "jsonl", "memory"])
def test_responses(tmp_path: Path, kind: str) -> None:
    parts = [some_ids(7), some_ids(4, seed=1)]
    answers = [response(parts[0], 5), response(parts[1], 2)]
    file = tmp_path / f"answers.{kind}"
    if kind == "memory":
        trace = RoutingTrace.from_sglang_response(
            [encoded(ids) for ids in parts], prompt_len=[5, 2], top_k=TOP_K, layers=range(LAYERS)
        )
    else:
        file.write_text(json.dumps(answers) if kind == "json" else "\n".join(map(json.dumps, answers)))
        assert list(recognise(file)) == ["sglang-response"]
        trace = RoutingTrace.from_sglang_response(file, top_k=TOP_K, layers=range(LAYERS))
        if kind == "json":  # eight tokens, of which the last has no row: three layers is the only number that fits
            again = RoutingTrace.from_sglang_response(file, top_k=TOP_K)
            assert again.content_hash() == trace.content_hash()
    np.testing.assert_array_equal(trace.topk_ids, np.concatenate(parts)[:, 1:])
    assert trace.prompt_len.tolist() == [5, 2]
    assert trace.layer_index.tolist() == [1, 2]


def test_lines_longer_than_the_first_look(tmp_path: Path) -> None:
    parts = [some_ids(9000), some_ids(4, seed=1)]
    file = tmp_path / "answers.jsonl"
    file.write_text("\n".join(json.dumps(response(ids, 2)) for ids in parts))
    assert file.read_text().index("\n") > 2**16
    assert list(recognise(file)) == ["sglang-response"]
    trace = RoutingTrace.from_sglang_response(file, top_k=TOP_K, layers=range(LAYERS))
    assert trace.sequence_lengths.tolist() == [9000, 4]
    (tmp_path / "one.json").write_text(json.dumps(response(parts[0], 2)))
    assert list(recognise(tmp_path / "one.json")) == ["sglang-response"]


@pytest.mark.parametrize("texts", [3, [], None])
def test_texts_in_memory_are_a_list(texts: Any) -> None:
    with pytest.raises(TraceError, match="expected a list of base64 texts"):
        RoutingTrace.from_sglang_response(texts, prompt_len=1, top_k=1, layers=[0])


def test_the_config_says_layers_picks_and_experts(tmp_path: Path) -> None:
    ids = np.argsort(np.random.default_rng(0).random((3, 32, 8)), axis=2)[:, :, :2]
    file = write(tmp_path, response(ids, 2), "answer.json")
    trace = RoutingTrace.from_sglang_response(file, config="mixtral-8x7b")
    np.testing.assert_array_equal(trace.topk_ids, ids)
    assert trace.num_experts == 8
    assert not trace.num_experts_inferred


@pytest.mark.parametrize(
    ("answer", "options", "message"),
    [
        (response(some_ids(4), 2), {}, "top_k or config says it"),
        (response(some_ids(4), None), {"top_k": 2, "prompt_len": 2}, "layers or config says it"),
        (response(some_ids(4), None), {"top_k": 2, "layers": [0, 1, 2]}, "prompt_len"),
        (response(some_ids(4), 2), {"top_k": 5, "layers": [0, 1, 2]}, "24 picks, no multiple of 3 x 5"),
        (response(some_ids(4), 2), {"top_k": 1, "layers": [0, 1, 2]}, "rows of 8 tokens for a request of 5"),
        (response(some_ids(4), -1), {"top_k": 2}, "prompt_tokens is -1"),
        ({"meta_info": {"routed_experts": "AAA"}}, {"top_k": 2}, "no whole base64"),
        ({"meta_info": {"routed_experts": "AAAA"}}, {"top_k": 2}, "decodes to 3 bytes"),
        ({"meta_info": {"routed_experts": "AAAA!AAA"}}, {"top_k": 2}, "no whole base64"),
        ({"meta_info": {"routed_experts": ""}}, {"top_k": 2}, "decodes to 0 bytes"),
        ({"meta_info": {"routed_experts": [1]}}, {"top_k": 2}, "expected base64 text"),
        ({"meta_info": {}}, {"top_k": 2}, "is None, expected base64 text"),
        ({"meta": {}}, {"top_k": 2}, "lacks 'meta_info'"),
        ([], {"top_k": 2}, "holds no responses"),
        (3, {"top_k": 2}, "response 0 is 3"),
    ],
)
def test_broken_responses_are_refused(tmp_path: Path, answer: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message) as caught:
        RoutingTrace.from_sglang_response(write(tmp_path, answer), **options)
    assert "dump.json" in str(caught.value)
    assert "\n" not in str(caught.value)


# ---- passes that are missing, doubled, out of order, or of several ranks ----


def numbered(*numbers: int, ranks: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    """A prompt of three tokens and decode steps, whose passes have these numbers."""
    every = [record(3, [0, 1, 2], 1, [3], 0)]
    every += [record(1, [2 + i], 2, None, i) for i in range(1, len(numbers))]
    ranks = ranks or (0,) * len(numbers)
    return [{**one, "forward_pass_id": n, "rank": r} for one, n, r in zip(every, numbers, ranks, strict=True)]


def test_passes_in_order_are_read_and_gaps_are_told(tmp_path: Path) -> None:
    found = import_files("sglang", [write(tmp_path, dump(*numbered(4, 5, 6)))])
    assert not [one for one in found.findings if "no record" in one.found]
    found = import_files("sglang", [write(tmp_path, dump(*numbered(4, 6, 9)))])
    (gap,) = [one for one in found.findings if one.defect == "missing-phase"]
    assert "has no record of the forward passes 5, 7-8" in gap.found
    idle = {**numbered(4)[0], "forward_mode": 4}
    one, two = numbered(4, 5)
    assert import_files("sglang", [write(tmp_path, dump(one, idle, two))]).result.num_layers > 0


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (numbered(4, 5, 5), "record 2: is forward pass 5, as is the record before it: it is recorded twice"),
        (numbered(4, 6, 5), "record 2: is forward pass 5, after pass 6; expected ids that increase"),
        (numbered(4, 4, 5, ranks=(0, 1, 0)), "record 1: is of rank 1, records before it are of rank 0"),
        (numbered(4, -1), "forward_pass_id is -1"),
        ([*numbered(4, 5)[:1], numbered(0, 0, 6)[2]], "follow no running request.*; forward passes 5 have no record"),
        (
            [numbered(4)[0], {**record(2, [5, 6], 1, [2], 3), "forward_pass_id": 7}],
            "begins a request at position 5 after passes without a record",
        ),
    ],
)
def test_passes_that_contradict_their_numbers(tmp_path: Path, records: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        RoutingTrace.from_sglang([write(tmp_path, dump(*records))])


def test_equal_counts_of_two_files_are_told(tmp_path: Path) -> None:
    files = []
    for name, counts in (("a.json", [[1, 2], [2, 1]]), ("b.json", [[2, 1], [1, 2]]), ("c.json", [[1, 2], [2, 1]])):
        files.append(write(tmp_path, {"logical_count": [counts]}, name))
    assert not import_files("sglang-stat", files[:2]).findings
    (finding,) = import_files("sglang-stat", files).findings
    assert finding.defect == "duplicate-tokens"
    assert "c.json has the very counts of a.json" in finding.found


@pytest.mark.parametrize("kind", ["json", "jsonl"])
def test_a_first_response_without_picks_is_named(tmp_path: Path, kind: str) -> None:
    answers = [{"text": "y"}, response(some_ids(4), 2)]
    file = tmp_path / f"a.{kind}"
    file.write_text(json.dumps(answers) if kind == "json" else "\n".join(map(json.dumps, answers)))
    with pytest.raises(TraceError, match=r"a\.json.*: (response 0|line 1): lacks 'meta_info'; holds text"):
        import_files("auto", [file], ImportOptions(top_k=2))
