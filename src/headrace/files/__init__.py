"""Files: positional and direct I/O, leftovers of dead runs, atomic writes, the safetensors format."""
