"""Elementwise kernels of the host and the device: `ops` and `packing` are the interface, the folders fill it.

ops, packing -> backends -> reference (plain torch, any device), numba (CPU), triton (CUDA); threads counts the CPUs.
"""
