"""Hardware: what this machine has, and what this process may use of it."""
