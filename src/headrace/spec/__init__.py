"""Frozen descriptions of a model, its layout in memory and its placement; standard library only."""
