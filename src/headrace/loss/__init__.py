"""Linear cross-entropy that never builds all logits: tiles of the head, chunks of tokens, lazy logits."""
