"""Recorded and synthetic expert routing: which experts every token picked in every layer."""

from perfmodel.routing.trace import Replay, RoutingTrace

__all__ = ["Replay", "RoutingTrace"]
