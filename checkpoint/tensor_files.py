"""Large files, written and brought to the disk in blocks, so that a slow disk is seen to move and a dead one is not."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Optional

import torch
from torch import Tensor

from common.files import BLOCK_BYTES
from common.heartbeat import HEARTBEAT

DTYPES = {torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16",
          torch.float16: "F16", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}  # widest first


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Optional[Mapping[str, str]] = None) -> None:
    """Write a safetensors file with the bytes that safetensors itself would write, but in blocks: those of a GPU never lie on
    the host as a whole, and each moves the pulse.

    Raises:
        OSError: it cannot be written.
    """
    ordered = sorted(tensors.items(), key=lambda item: ([*DTYPES].index(item[1].dtype), item[0]))
    header, end = ({"__metadata__": dict(metadata)} if metadata else {}), 0
    for name, tensor in ordered:
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            for block in tensor.detach().flatten().view(torch.uint8).split(BLOCK_BYTES):
                file.write(block.cpu().numpy())
                HEARTBEAT.move()
