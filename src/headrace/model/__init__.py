"""The user's model: its block stacks, its parked weights, the takeover of calls."""
