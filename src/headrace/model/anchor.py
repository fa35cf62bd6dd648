"""Anchors: they make a visit of streamed weights part of the user's graph, and tell whether gradients are wanted.

Streamed weights are no inputs of their visit's node, so that autograd does not know that a backward reaches them. An
anchor stands for them there: its accumulator is executed exactly when theirs would be.
"""

from __future__ import annotations

import torch


class Anchor:
    """Stands for a visit's weights in the graph: `tensor` is an input of the visit's node."""

    def __init__(self, trained: bool) -> None:
        self.tensor = torch.zeros((), requires_grad=trained)
        self._accumulator: torch.autograd.graph.Node | None = None
        if trained:
            with torch.enable_grad():
                node = self.tensor.view_as(self.tensor).grad_fn
            assert node is not None
            self._accumulator = node.next_functions[0][0]  # it lives as long as somebody holds it

    def wanted(self) -> bool:
        """Whether the backward under way accumulates weights' gradients; not so under autograd.grad or inputs=."""
        node = self._accumulator
        return node is not None and bool(torch._C._will_engine_execute_node(node))
