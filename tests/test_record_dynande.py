"""DynaNDE's tables of tensors as torch saves them."""

from pathlib import Path

import numpy as np
import pytest

from perfmodel.routing import RoutingTrace
from perfmodel.routing.importers import recognise

torch = pytest.importorskip("torch")


def test_a_pt_file(tmp_path: Path) -> None:
    indices = torch.tensor([[1, 0], [2, 3], [5, 4], [0, 2]])
    content = {
        "model": "some-moe",
        "runid": "3",
        "layer": 5,
        "samples": torch.arange(4),
        "scores": torch.full((4, 2), 0.5),
        "indices": indices,
        "num_sequences": 2,
        "sequence_length": 2,
    }
    torch.save(content, tmp_path / "a.pt")
    assert list(recognise(tmp_path / "a.pt")) == ["dynande"]
    trace = RoutingTrace.from_dynande(tmp_path / "a.pt", prompt_len=1)
    np.testing.assert_array_equal(trace.topk_ids[:, 0], indices.numpy())
    assert trace.sequence_offsets.tolist() == [0, 2, 4]
    assert trace.layer_index.tolist() == [5]
    assert trace.metadata["model"] == "some-moe"
