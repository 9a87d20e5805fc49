"""RouterTrace version 2: what it gives, its provenance, and refusals."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perfmodel.errors import TraceError
from perfmodel.routing import RoutingTrace
from perfmodel.routing.importers.base import ImportOptions
from perfmodel.routing.importers.probe import Probe
from perfmodel.routing.importers.router_trace import read, recognise

CAPTURED: dict[str, Any] = {
    "version": 2,
    "source": {
        "kind": "captured",
        "model": {"id": "someone/some-moe", "revision": "0123456789" * 4},
        "tokenizer": {"revision": "0123456789" * 4},
        "software": {"transformersVersion": "4.57.1", "pytorchVersion": "2.7.1"},
        "capture": {"seed": 7, "device": "cpu", "dtype": "torch.float32"},
    },
    "scenario": "two-topics",
    "seed": 7,
    "tokens": 4,
    "layers": 2,
    "expertsPerLayer": 5,
    "topK": 2,
    "selections": [[[0, 1], [2, 3]], [[1, 0], [3, 2]], [[4, 1], [0, 3]], [[2, 1], [4, 0]]],
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """The document with another value at a place such as ``source.model.id``; without one for None."""
    document = copy.deepcopy(CAPTURED)
    place: Any = document
    *folders, last = path.split(".")
    for folder in folders:
        place = place[int(folder) if isinstance(place, list) else folder]
    if value is None:
        del place[last]
    elif isinstance(place, list):
        place[int(last)] = value
    else:
        place[last] = value
    return document


def load(folder: Path, document: Any, **options: Any) -> RoutingTrace:
    file = folder / "trace.json"
    file.write_text(json.dumps(document))
    result = read([file], ImportOptions(**{"prompt_len": (1,), **options})).result
    assert isinstance(result, RoutingTrace)
    return result


def test_a_captured_trace(tmp_path: Path) -> None:
    trace = load(tmp_path, CAPTURED)
    np.testing.assert_array_equal(trace.topk_ids, CAPTURED["selections"])
    assert trace.topk_weights is None
    assert trace.num_experts == 5
    assert trace.sequence_offsets.tolist() == [0, 4]
    assert trace.prompt_len.tolist() == [1]
    assert trace.layer_index.tolist() == [0, 1]
    found = trace.metadata
    assert (found["model"], found["source"], found["revision"]) == ("someone/some-moe", "recorded", "0123456789" * 4)
    assert (found["transformers"], found["torch"], found["dtype"]) == ("4.57.1", "2.7.1", "torch.float32")
    assert found["scenario"] == "two-topics"
    assert found["layers_inferred"] is True
    assert recognise(Probe.of(tmp_path / "trace.json")) == "is an object with selections, version 2"


def test_what_the_document_does_not_say_is_given(tmp_path: Path) -> None:
    trace = load(tmp_path, CAPTURED, sequence_len=(1, 3), prompt_len=(1, 2), layers=(1, 3), model="mine")
    assert trace.sequence_offsets.tolist() == [0, 1, 4]
    assert trace.prompt_len.tolist() == [1, 2]
    assert trace.layer_index.tolist() == [1, 3]
    assert trace.metadata["model"] == "mine"
    assert "layers_inferred" not in trace.metadata


def test_a_generated_trace_is_synthetic(tmp_path: Path) -> None:
    trace = load(tmp_path, changed("source", {"kind": "synthetic", "generator": "a/b"}))
    assert trace.metadata["source"] == "synthetic"
    assert trace.metadata["generator"] == "a/b"
    assert trace.metadata["model"] == "an unknown model"


def test_the_shared_recording(shared: Path) -> None:
    file = shared / "traces" / "router-trace-v2" / "switch-base-8.json"
    assert recognise(Probe.of(file)) is not None
    trace = read([file], ImportOptions(layers=(1, 3, 5, 7, 9, 11))).result
    assert isinstance(trace, RoutingTrace)
    assert trace.prompt_len.tolist() == [215]  # one pass over the text
    assert (trace.num_tokens, trace.num_layers, trace.top_k, trace.num_experts) == (215, 6, 1, 8)
    np.testing.assert_array_equal(trace.topk_ids, json.loads(file.read_text())["selections"])
    assert trace.metadata["model"] == "google/switch-base-8"
    assert trace.metadata["source"] == "recorded"


@pytest.mark.parametrize(
    ("document", "options", "message"),
    [
        (CAPTURED, {"prompt_len": (5,)}, "--prompt-len is 5 for sequence 0, which has 4 rows"),
        (CAPTURED, {"sequence_len": (3,)}, "--sequence-len adds up to 3 rows"),
        (CAPTURED, {"layers": (3, 1)}, "--layers names 2 layers; allowed: 2, each larger"),
        (CAPTURED, {"num_experts": 8}, "expertsPerLayer is 5, --num-experts says 8"),
        ([CAPTURED], {}, "the document is .*expected an object"),
        (changed("version", 1), {}, r"version is 1, expected an integer in 2\.\.2"),
        (changed("version", None), {}, "lacks 'version'"),
        (changed("tokens", 5), {}, "selections is a list of 4, expected a list of 5"),
        (changed("tokens", 4.0), {}, r"tokens is 4\.0"),
        (changed("tokens", True), {}, "tokens is True"),
        (changed("layers", 0), {}, "layers is 0"),
        (changed("topK", 6), {}, "topK is 6"),
        (changed("expertsPerLayer", 2**40), {}, "expertsPerLayer is 1099511627776"),
        (changed("selections", {}), {}, r"selections is \{\}"),
        (changed("selections.1", [[1, 0]]), {}, r"selections\[1\] is a list of 1, expected a list of 2"),
        (changed("selections.1.0", [1]), {}, r"selections\[1\]\[0\] is a list of 1"),
        (changed("selections.1.0", [1, 1]), {}, "picks expert 1 twice"),
        (changed("selections.1.0", [1, 5]), {}, r"selections\[1\]\[0\] is 5, expected an integer in 0\.\.4"),
        (changed("selections.1.0", [1, "0"]), {}, r"selections\[1\]\[0\] is '0'"),
        (changed("source", None), {}, "lacks 'source'"),
        (changed("source.kind", "guessed"), {}, r"source\.kind is 'guessed', expected 'captured' or 'synthetic'"),
        (changed("source.model.revision", "main"), {}, r"source\.model\.revision is 'main', expected 40 or 64"),
        (changed("source.model", None), {}, "source: lacks 'model'"),
        (changed("source.capture.seed", 8), {}, r"source\.capture\.seed is 8, seed is 7"),
        (changed("source.software", []), {}, r"source\.software is \[\], expected an object"),
    ],
)
def test_refusals(tmp_path: Path, document: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=rf"trace\.json: .*{message}") as caught:
        load(tmp_path, document, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"version": 2, "version": 2}', '{"tokens": NaN}', '{"tokens": 1e400}']
)
def test_broken_documents(tmp_path: Path, text: str) -> None:
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(TraceError, match=r"trace\.json: "):
        read([tmp_path / "trace.json"], ImportOptions(prompt_len=(1,)))


def test_other_documents_are_not_recognised(tmp_path: Path) -> None:
    for text in ('{"selections": [], "version": 2}', "[1]", "1", "a,b\n"):
        (tmp_path / "a").write_text(text)
        assert recognise(Probe.of(tmp_path / "a")) is None
    with pytest.raises(TraceError, match="a second file"):
        read([tmp_path / "a", tmp_path / "b"], ImportOptions())
