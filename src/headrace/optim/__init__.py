"""Update rules over flat regions, and the torch-compatible front of the optimizer."""
