"""Stores: arenas on the device and in host memory, the disk file of a session."""
