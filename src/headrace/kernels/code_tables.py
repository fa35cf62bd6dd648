"""What the codes of nf4 and of compressed scales stand for: the tables of bitsandbytes 0.50, bit for bit.

nf4: 16 quantiles of the normal distribution (https://arxiv.org/abs/2305.14314, appendix E). Dynamic: 256 numbers whose
exponent takes more or fewer of the 8 bits (https://arxiv.org/abs/1511.04561); the largest, 1, has no negative.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# Code 128 to code 254 as little-endian fp32: torch's own linspace, which made them, differs between processors.
_DYNAMIC = bytes.fromhex(
    "b7a31335941a5a36ff0502370642b23734803738b3ef8a384b1fba380bd7233905e78c3983e2c739016f013ac1ec1e3a806a3c3a"
    "3ee8593aff65773a9defa73afca9f13a2db21d3b5c8f423b8a6c673bdd24863b7493983b0d02ab3ba470bd3b3bdfcf3bd34de23b"
    "6abcf43b8195033ccdcc0c3c1804163c643b1f3c48e13a3cc3f5683c1f858b3c5d8fa23c9a99b93cd7a3d03c15aee73c52b8fe3c"
    "48e10a3d6766163d85eb213da3702d3dc3f5383de17a443d0000503d1f855b3d3d0a673d5d8f723d7b147e3dcdcc843d5d8f8a3d"
    "eb51903d7b14963d0ad79b3d9a99a13d2a5ca73db81ead3d48e1b23dd7a3b83d6766be3df728c43d85ebc93d3433db3d0000f83d"
    "66660a3ecdcc183e3333273e9a99353e0000443e6666523ecdcc603e33336f3e99997d3e0000863e34338d3e6666943e9a999b3e"
    "cccca23e0000aa3e3333b13e6666b83e9a99bf3eccccc63e0000ce3e3333d53e6666dc3e9a99e33eccccea3e0000f23e3233f93e"
    "3333003fcccc033f6666073f00000b3f9a990e3f3433123fcdcc153f6666193f00001d3f9a99203f3433243fcdcc273f66662b3f"
    "00002f3f9a99323f3433363fcdcc393f66663d3f0000413f9a99443f3333483fcdcc4b3f66664f3f0000533f9a99563f33335a3f"
    "cdcc5d3f6666613f0000653f9a99683f33336c3fcdcc6f3f6666733f0000773f9a997a3f33337e3f"
)
_STEPS = 65535  # bitsandbytes looks codes up in a table of so many steps from -1 to 1


@functools.cache
def nf4_values(device: torch.device) -> Tensor:
    """(16,) fp32 on `device`: what each code stands for, times the scale."""
    return torch.tensor(_NF4, device=device)


@functools.cache
def nf4_bounds(device: torch.device) -> Tensor:
    """(15,) fp32 on `device`: halfway between neighbours; a number on a bound takes the lower code."""
    values = nf4_values(device)
    return (values[:-1] + values[1:]) / 2


@functools.cache
def dynamic_values(device: torch.device) -> Tensor:
    """(256,) fp32 on `device`: what the code of a compressed scale stands for, ascending."""
    positive = torch.frombuffer(bytearray(_DYNAMIC), dtype=torch.float32)
    return torch.cat([-positive.flip(0), torch.zeros(1), positive, torch.ones(1)]).to(device)


@functools.cache
def dynamic_codes(device: torch.device) -> Tensor:
    """(65536,) uint8 on `device`: the code of -1 + 2 i / 65535."""
    values = dynamic_values(torch.device("cpu"))
    bounds = (values[:-1] + values[1:]) * 0.5
    steps = -1.0 + (2.0 * torch.arange(_STEPS + 1, dtype=torch.float32)) / float(_STEPS)
    return torch.bucketize(steps, bounds).to(torch.uint8).to(device)
