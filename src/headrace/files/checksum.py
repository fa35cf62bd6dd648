"""Checksums of tensors: tells a damaged file from a good one, as fast as disks read."""

from __future__ import annotations

import struct
import zlib

from torch import Tensor

from headrace.files.positional import PIECE, THREADS, share, tensor_bytes


def checksum(tensor: Tensor) -> str:
    """CRC-32, in hex, of the CRC-32s of the tensor's pieces of 4 MiB (contiguous, CPU).

    One CRC is a chain and runs on one core at about 1.4 GB/s; those of the pieces run beside each other.
    """
    data = tensor_bytes(tensor)
    sums = [0] * -(-len(data) // PIECE)

    def work(start: int, stop: int) -> None:
        sums[start // PIECE] = zlib.crc32(data[start:stop])

    share(work, len(data), THREADS)
    return f"{zlib.crc32(struct.pack(f'<{len(sums)}I', *sums)):08x}"
