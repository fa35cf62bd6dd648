"""The safetensors format: own reader of the index and own streaming writer, without mmap and without whole copies.

A file is an 8-byte little-endian header length, a JSON header, and the data of all tensors without holes
(https://github.com/huggingface/safetensors#format).
"""

from headrace.files.safetensors.header import DTYPES, Header, TensorEntry, TensorSpec, encode_header, read_header
from headrace.files.safetensors.reader import TensorReader, read_tensor
from headrace.files.safetensors.writer import ShardWriter, write_tensor

__all__ = [
    "DTYPES",
    "Header",
    "ShardWriter",
    "TensorEntry",
    "TensorReader",
    "TensorSpec",
    "encode_header",
    "read_header",
    "read_tensor",
    "write_tensor",
]
