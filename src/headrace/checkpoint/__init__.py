"""Exact resume state on disk, and export in the format of transformers."""
