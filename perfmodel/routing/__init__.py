"""Recorded and synthetic expert routing: which experts every token picked in every layer."""

from perfmodel.routing.blocks import open_trace
from perfmodel.routing.profile import FrequencyProfile
from perfmodel.routing.replay import Replay
from perfmodel.routing.trace import RoutingTrace

__all__ = ["FrequencyProfile", "Replay", "RoutingTrace", "open_trace"]
