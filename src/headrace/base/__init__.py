"""Errors, events and units: what every other room may use."""
