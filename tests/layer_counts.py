"""What the tests of the network families share: parameters by layer, and refusals."""

from typing import Any

import pytest

from perfmodel.errors import ModelConfigError
from perfmodel.model import MoEModel


def layer_params(model: MoEModel) -> list[int]:
    """Parameters of each layer, norms included."""
    classes = ("attention", "norm", "dense", "shared", "router", "expert")
    return [sum(int(row[one]) for one in classes) for row in model.params_by_layer()]


def refused(config: dict[str, Any], **changes: Any) -> str:
    """The message with which a changed config is refused; a change to ``...`` takes the key out."""
    changed = {key: value for key, value in {**config, **changes}.items() if value is not ...}
    with pytest.raises(ModelConfigError) as caught:
        MoEModel.from_config(changed)
    message = str(caught.value)
    assert "\n" not in message
    return message
