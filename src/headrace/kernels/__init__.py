"""Elementwise kernels of the host and the device: `ops` is the interface, the folders beside it fill it.

ops -> backends -> reference (plain torch, any device), numba (CPU), triton (CUDA); threads counts the CPUs.
"""
