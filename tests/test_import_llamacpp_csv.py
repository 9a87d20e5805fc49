"""Logs of llama.cpp: calls, phases and sequences from the order of rows, its traps, and refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.errors import TraceError
from perfmodel.routing import RoutingTrace
from perfmodel.routing.defects import Finding
from perfmodel.routing.importers import import_files
from perfmodel.routing.importers.base import Imported, ImportOptions
from perfmodel.routing.importers.llamacpp_csv import read, recognise
from perfmodel.routing.importers.probe import Probe

LAYERS = (3, 4, 6)
HEADER = "layer_id,expert_ids\n"


def call(tokens: int, first: int = 0, skip: bool = False, layers: tuple[int, ...] = LAYERS) -> str:
    """Rows of one call; token t picks experts (first + t + layer) % 10 and the next one."""
    rows = []
    for layer in layers:
        only_last = skip and layer == layers[-1]
        for t in range(tokens - 1 if only_last else 0, tokens):
            pick = (first + t + layer) % 10
            rows.append(f"{layer},{pick} {(pick + 1) % 10}\n")
    return "".join(rows)


def load(folder: Path, text: str, **options: Any) -> Imported:
    (folder / "log.csv").write_text(text)
    return read([folder / "log.csv"], ImportOptions(**options))


def trace_of(imported: Imported) -> RoutingTrace:
    assert isinstance(imported.result, RoutingTrace)
    return imported.result


@given(
    sequences=st.lists(
        st.tuples(st.lists(st.integers(2, 4), min_size=1, max_size=2), st.integers(1, 4)), min_size=1, max_size=3
    ),
    skip=st.booleans(),
)
def test_calls_tell_phases_and_sequences(
    tmp_path_factory: pytest.TempPathFactory, sequences: list[tuple[list[int], int]], skip: bool
) -> None:
    text, tokens = HEADER, 0
    lengths, prompts = [], []
    skipped = 0
    for prompt, steps in sequences:
        for size in [*prompt, *[1] * steps]:
            text += call(size, tokens, skip)
            tokens += size
            skipped += size - 1
        lengths.append(sum(prompt) + steps)
        prompts.append(sum(prompt))
    imported = load(tmp_path_factory.mktemp("llama"), text, num_experts=10)
    trace = trace_of(imported)
    assert trace.sequence_lengths.tolist() == lengths
    assert trace.prompt_len.tolist() == prompts
    assert trace.layer_index.tolist() == list(LAYERS)
    whole = (np.arange(tokens)[:, None] + np.array(LAYERS)) % 10
    np.testing.assert_array_equal(trace.topk_ids[:, :2, 0], whole[:, :2])
    np.testing.assert_array_equal(trace.topk_ids[:, :2, 1], (whole[:, :2] + 1) % 10)
    missing = trace.topk_ids[:, 2, 0] == trace.unassigned
    assert missing.sum() == (skipped if skip else 0)
    np.testing.assert_array_equal(trace.topk_ids[~missing, 2, 0], whole[~missing, 2])
    assert [one.defect for one in imported.findings] == (["padding"] if missing.any() else [])


def test_missing_picks_are_told_once(tmp_path: Path) -> None:
    text = call(3, skip=True) + call(1, 3)
    (tmp_path / "picks.csv").write_text(text)
    for mend in (frozenset[str](), frozenset({"padding", "warm-up"})):
        found = import_files("llamacpp-csv", [tmp_path / "picks.csv"], ImportOptions(num_experts=10, mend=mend))
        (padding,) = (one for one in found.findings if one.defect == "padding")
        assert padding.found == "layer 6: 2 tokens of prompts without picks; llama.cpp computes only the last one"
        assert padding.mended


def test_a_part_of_a_prompt_may_not_reach_the_last_layer(tmp_path: Path) -> None:
    # Two calls of one prompt: logits are asked for the last token alone.
    text = call(3, layers=LAYERS[:2]) + call(2, 3, skip=True) + call(1, 5)
    imported = load(tmp_path, text)
    trace = trace_of(imported)
    assert trace.prompt_len.tolist() == [5]
    assert (trace.topk_ids[:, 2, 0] == trace.unassigned).tolist() == [True, True, True, True, False, False]
    assert imported.findings == (
        Finding(
            "padding",
            "layer 6: 4 tokens of prompts without picks; llama.cpp computes only the last one",
            "leave them unassigned",
            mended=True,
        ),
    )
    assert trace.num_experts_inferred


def test_the_warm_up_call_is_left_out_and_tells_the_number_of_experts(tmp_path: Path) -> None:
    every = " ".join(map(str, range(12)))
    warm_up = "".join(f"{layer},{every}\n" * (1 if layer == 6 else 2) for layer in LAYERS)
    imported = load(tmp_path, HEADER + warm_up + call(2) + call(1, 2))
    trace = trace_of(imported)
    assert trace.num_experts == 12
    assert not trace.num_experts_inferred
    assert trace.num_tokens == 3
    assert [(one.defect, one.mended) for one in imported.findings] == [("warm-up", True)]
    assert "12 experts" in imported.findings[0].found
    # In a short log most rows may be of the warm-up; the user then says how many picks are right.
    alone = load(tmp_path, warm_up + call(1), top_k=2)
    assert trace_of(alone).num_tokens == 1


def test_what_the_user_says_wins(tmp_path: Path) -> None:
    text = HEADER + call(2) + call(1, 2) + call(1, 3)
    assert trace_of(load(tmp_path, text, prompt_len=(3,))).prompt_len.tolist() == [3]
    trace = trace_of(load(tmp_path, text, sequence_len=(2,), prompt_len=(1, 0), model="m"))
    assert trace.sequence_offsets.tolist() == [0, 2, 4]
    assert trace.prompt_len.tolist() == [1, 0]
    assert trace.metadata["model"] == "m"


def test_decode_alone_has_no_prompt(tmp_path: Path) -> None:
    assert trace_of(load(tmp_path, call(1) + call(1, 1))).prompt_len.tolist() == [0]


def test_one_layer_does_not_show_calls(tmp_path: Path) -> None:
    text = call(4, layers=(5,))
    with pytest.raises(TraceError, match="does not say which rows are prefill"):
        load(tmp_path, text)
    assert trace_of(load(tmp_path, text, prompt_len=(3,))).prompt_len.tolist() == [3]


def test_other_lines_of_the_log_are_passed_over(tmp_path: Path) -> None:
    text = "gate_input,3,0,0.5 0.25\n" + HEADER + call(2) + "\ngate_input,3,0,0.5\n" + HEADER + call(1, 2)
    assert trace_of(load(tmp_path, text)).num_tokens == 3
    assert recognise(Probe.of(tmp_path / "log.csv")) == "has the header layer_id,expert_ids"


def test_recognised_by_content(tmp_path: Path) -> None:
    file = tmp_path / "x"
    for text, found in (
        (HEADER, True),
        (call(2) + call(1), True),
        ("3,4\n", False),
        ("a,1 2\n", False),
        ("1\t2\n", False),
    ):
        file.write_text(text)
        assert (recognise(Probe.of(file)) is not None) == found, text


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (HEADER, {}, "has no rows of picks"),
        ("", {}, "is empty"),
        (call(1) + "3\n", {}, "line 4 is '3', expected layer_id,expert_ids"),
        (call(1) + "3,1,2\n", {}, "line 4 is '3,1,2', expected"),
        (call(1) + "3,\n", {}, "line 4, column 1 is ''"),
        (call(1) + "3,1  2\n", {}, "line 4, column 2 is ''"),
        (call(1) + "x,1 2\n", {}, "line 4, layer_id is 'x'"),
        (call(1) + "-1,1 2\n", {}, "line 4, layer_id is '-1'"),
        (call(1) + "3,1 1\n", {}, "line 4 picks an expert twice; .* strided view"),
        (call(1) + "3,1 70000\n", {}, "line 4 picks expert 70000"),
        (call(1) + "3,1 2 4\n", {}, "line 4 has 3 experts, expected 2"),
        (call(1), {"top_k": 3}, "line 1 has 2 experts, expected 3"),
        (call(1), {"num_experts": 5}, "is expert 5, allowed are 0..4"),
        (call(2) + call(1)[:12], {}, "line 8: layer 6 has 0 rows, layer 3 of its call has 1; is the log cut"),
        (call(3).replace("\n6,", "\n5,", 1), {}, "line 7: layer 5 has 1 rows, layer 3 of its call has 3"),
        (call(2) + call(1), {"prompt_len": (4,)}, "--prompt-len is 4 for sequence 0, which has 3 rows"),
        (call(2) + call(1), {"sequence_len": (4,), "prompt_len": (1,)}, "--sequence-len adds up to 4 rows"),
        (call(2) + call(1), {"sequence_len": (3,)}, "does not say which rows are prefill"),
        (call(1) + "3," + "1 " * 10**5 + "2\n", {}, r"line 4: 100,001 columns; allowed"),
        (call(1) + "3,1 2\0\n", {}, "line 4 holds the byte zero"),
    ],
)
def test_refusals(tmp_path: Path, text: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=rf"log\.csv: .*{message}") as caught:
        load(tmp_path, text, **options)
    assert "\n" not in str(caught.value)


def test_one_file_a_recording(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="a second file"):
        read([tmp_path / "a", tmp_path / "b"], ImportOptions())


@pytest.mark.parametrize(
    "header", ["Layer_ID,Expert_IDs", "layer_id, expert_ids", '"layer_id","expert_ids"', " layer_id ,EXPERT_IDS "]
)
def test_headers_in_other_cases_with_blanks_and_quotes(tmp_path: Path, header: str) -> None:
    file = tmp_path / "log.csv"
    file.write_text(header + "\n" + call(3) + call(1, 3))
    assert recognise(Probe.of(file)) == "has the header layer_id,expert_ids"
    assert trace_of(load(tmp_path, header + "\n" + call(3) + call(1, 3))).num_tokens == 4


@pytest.mark.parametrize(
    "text",
    [
        call(2),
        "".join(f"{n},{n + 1} {n + 2}\n" for n in range(30)),
        "".join(f"{(7 * n * n) % 31},{n} {n + 1} {n + 2}\n" for n in range(200)),
        "".join(f"{n % 2},{n // 2} {n // 2}\n" for n in range(40)),
        "".join(f"3,{n} {n + 1}\n" for n in range(40)),
    ],
)
def test_lists_without_a_header_that_show_no_calls_are_only_nearly_logs(tmp_path: Path, text: str) -> None:
    file = tmp_path / "log.csv"
    file.write_text(text)
    assert recognise(Probe.of(file)) is None
    with pytest.raises(TraceError, match=r"looks like llamacpp-csv, but .* name the format llamacpp-csv"):
        import_files("auto", [file])
