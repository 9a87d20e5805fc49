"""Running a real model: what it needs, and the recorder of routing traces (extra ``record``)."""

from perfmodel.record.prompts import Prompt
from perfmodel.record.trace import record_trace

__all__ = ["Prompt", "record_trace"]
