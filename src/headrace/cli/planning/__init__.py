"""What `headrace plan` does: look at a model and a machine, weigh ways to train, and tell what was found."""
