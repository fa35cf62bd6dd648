"""Integrations: Headrace inside the training loops of other libraries."""
