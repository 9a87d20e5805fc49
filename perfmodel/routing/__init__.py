"""Recorded and synthetic expert routing: which experts every token picked in every layer."""

from perfmodel.routing.replay import Replay
from perfmodel.routing.trace import RoutingTrace

__all__ = ["Replay", "RoutingTrace"]
