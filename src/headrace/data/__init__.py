"""Training data: files to rows, rows to tokens, tokens to batches, in an order that can be resumed."""
