"""Figures of a survey of routing; ``figures`` puts them together, and the other modules draw one kind each."""
