"""Codecs at work: weights into packed bytes, packed bytes into weights; the formats are in `headrace.spec.codecs`."""
