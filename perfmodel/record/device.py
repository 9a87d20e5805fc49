"""Where a model runs."""

import re
from typing import Any

from perfmodel.errors import PerfModelError
from perfmodel.routing.npz import one_line, shown

ALLOWED = "cpu, cuda, cuda:N, mps"


def check_device(device: str, torch: Any) -> None:
    """Refuse a device that PyTorch does not have here. Raises :class:`PerfModelError`."""
    given: object = device
    if not isinstance(given, str) or not re.fullmatch(r"cpu|mps|cuda(:[0-9]{1,3})?", given):
        raise PerfModelError(f"device: found {shown(device)}, allowed: {ALLOWED}")
    kind, _, number = device.partition(":")
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(number or 0) >= count:
            raise PerfModelError(f"device: found {device}, allowed: cpu{f', cuda:0 to cuda:{count - 1}' * (count > 0)}")
    elif kind == "mps" and not torch.backends.mps.is_available():
        raise PerfModelError("device: found mps, which is not available here; allowed: cpu")


def place(model: Any, device: str) -> Any:
    """The model on a device. Raises :class:`PerfModelError` where it does not fit."""
    try:
        return model.to(device)
    except RuntimeError as error:  # among them torch.OutOfMemoryError
        raise PerfModelError(f"device {device}: the model cannot be placed there ({one_line(error)})") from error
