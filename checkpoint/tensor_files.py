"""Reading and writing safetensors files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Optional

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from common.errors import CheckpointError
from common.files import BLOCK_BYTES, plain
from common.heartbeat import HEARTBEAT

# Widest first, which is the order of tensors in a file of safetensors.
DTYPES = {torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.int32: "I32",
          torch.bfloat16: "BF16", torch.float16: "F16", torch.int16: "I16", torch.int8: "I8",
          torch.uint8: "U8", torch.bool: "BOOL"}


def write_tensors(path: Path, tensors: Mapping[str, Tensor],
                  metadata: Optional[Mapping[str, str]] = None) -> None:
    """Write a safetensors file, byte for byte as safetensors would. Raises OSError if it cannot."""
    # Not by safetensors.torch.save_file: it copies all tensors of a GPU to the host at once, and it is one
    # call without a heartbeat, so that a slow disk could not be told from a hang.
    ordered = sorted(tensors.items(), key=lambda item: ([*DTYPES].index(item[1].dtype), item[0]))
    header, end = ({"__metadata__": dict(metadata)} if metadata else {}), 0
    for name, tensor in ordered:
        offsets = [end, end := end + tensor.nbytes]
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            for block in tensor.detach().flatten().view(torch.uint8).split(BLOCK_BYTES):
                file.write(block.cpu().numpy())
                HEARTBEAT.beat()


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return a safetensors file's tensors, on the CPU. Raises CheckpointError if it cannot be read."""
    try:
        open(path, "rb", opener=plain).close()  # refuses a pipe, for which safetensors would wait
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; copy or download it again") from error
