"""Sharding with torch's FSDP2. The ranks of a shard group hold one copy of the model together.

Each rank holds some rows of every matrix, its gradient and its optimizer state. Vectors are small and whole.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Optional

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from common.activity import waiting
from parallel.ranks import GROUP_TIMEOUT_MARGIN_SECONDS, Ranks, collective

ReadRows = Callable[[int, int], Tensor]  # returns rows first..stop of a stored tensor
SHARD = "shard"  # the dimension of the mesh along which matrices are divided


@collective
def make_mesh(ranks: Ranks, ranks_per_copy: int) -> DeviceMesh:
    """Return the mesh (replicate, shard) of all ranks, or (shard) if they hold one copy of the model."""
    if not dist.is_initialized():  # a single process
        dist.init_process_group("nccl" if ranks.device.type == "cuda" else "gloo", store=dist.HashStore(),
                                rank=0, world_size=1)
    if ranks_per_copy == ranks.world_size:
        return init_device_mesh(ranks.device.type, (ranks_per_copy,), mesh_dim_names=(SHARD,))
    mesh = torch.arange(ranks.world_size).view(-1, ranks_per_copy)
    # Not by init_device_mesh, whose groups time out by themselves: the watchdog decides, and names the ranks.
    timeout = timedelta(seconds=GROUP_TIMEOUT_MARGIN_SECONDS)
    groups = [dist.new_subgroups_by_enumeration(each.tolist(), timeout)[0] for each in (mesh.T, mesh)]
    return DeviceMesh.from_group(groups, ranks.device.type, mesh, mesh_dim_names=("replicate", SHARD))


def shard_model(model: nn.Module, mesh: DeviceMesh, compute_dtype: torch.dtype,
                gradient_dtype: torch.dtype = torch.float32, offload: bool = False,
                reproducible: bool = False) -> None:
    """Divide a model's matrices over the ranks of the mesh, preferably while the model is on the meta device.

    Ranks gather weights in `compute_dtype`: a block for its forward and again for its backward, the embedding
    for its look-up, the head from its forward to its backward. They exchange gradients in `gradient_dtype`,
    but those of embedding and head in float32, so that sums are as precise as without sharding. `offload`
    keeps everything in the host's memory. With `reproducible`, the run's reducer, not FSDP, adds the
    gradients of the copies, over the group `model.copies`.
    """
    # Imported here: it takes half a second, and most runs shard nothing.
    from torch.distributed import fsdp

    if reproducible:
        model.copies, mesh = mesh.get_group("replicate") if mesh.ndim > 1 else None, mesh[SHARD]
    vectors = {parameter for parameter in model.parameters() if parameter.ndim < 2}
    # Inputs are not cast: cosines and sines stay float32.
    policy = fsdp.MixedPrecisionPolicy(compute_dtype, gradient_dtype, cast_forward_inputs=False)
    offloading = fsdp.CPUOffloadPolicy(torch.cuda.is_available()) if offload else fsdp.OffloadPolicy()
    shard = partial(fsdp.fully_shard, mesh=mesh, ignored_params=vectors, mp_policy=policy,
                    offload_policy=offloading)
    head = model.head_matrix
    has_backward = any(parameter.requires_grad for parameter in model.parameters())
    for module in (model.tok_embeddings, *model.layers, head):
        if not is_sharded(module):  # the head may be the embedding
            shard(module, reshard_after_forward=module is not head or not has_backward)
    fsdp.register_fsdp_forward_method(head, "use_as_head")
    model.tok_embeddings.set_unshard_in_backward(False)  # a look-up's gradient does not need the matrix
    shard(model)  # nothing else is left in it
    # fully_shard's own hook comes between these two.
    model.register_forward_pre_hook(Hidden.hide, prepend=True, with_kwargs=True)
    model.register_forward_pre_hook(Hidden.show, with_kwargs=True)


class Hidden:
    """Arguments that fully_shard does not see: it would copy the document ids, which the host reads."""

    def __init__(self, args: tuple, named: dict):
        self.args, self.named = args, named

    @staticmethod
    def hide(model: nn.Module, args: tuple, named: dict) -> tuple[tuple, dict]:
        return (Hidden(args, named),), {}

    @staticmethod
    def show(model: nn.Module, hidden: tuple, _: dict) -> tuple[tuple, dict]:
        return hidden[0].args, hidden[0].named


# ------------------------------------------------------------------------------- a rank's local rows


def is_sharded(model: nn.Module) -> bool:
    return hasattr(type(model), "reshard")  # torch's FSDPModule


def is_divided(tensor: Tensor) -> bool:
    """Return whether a parameter is divided by rows; False if every rank holds all of it."""
    return hasattr(tensor, "device_mesh")  # torch's DTensor


def local_rows(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a parameter or gradient, not a copy; the tensor itself if not divided."""
    return tensor.detach().to_local() if is_divided(tensor) else tensor


def local_span(tensor: Tensor, rank: Optional[int] = None) -> tuple[int, int]:
    """Return the start and the end of the rows of this rank, or of another one of its shard group."""
    rows = tensor.shape[0] if tensor.ndim else 1
    if not is_divided(tensor):
        return 0, rows
    each = -(-rows // tensor.device_mesh[SHARD].size())
    rank = tensor.device_mesh.get_local_rank(SHARD) if rank is None else rank
    start = min(rows, each * rank)
    return start, min(rows, start + each)


@torch.no_grad()
def load_rows(parameter: Tensor, read: ReadRows) -> None:
    start, end = local_span(parameter)
    if start < end:
        local_rows(parameter).copy_(read(start, end))


def put(parameter: Tensor, full: Tensor) -> None:
    load_rows(parameter, lambda start, end: full[start:end])


def ranks_per_copy(model: nn.Module) -> int:
    return next((each.device_mesh[SHARD].size() for each in model.parameters() if is_divided(each)), 1)


@collective
def send_rows(rows: Tensor, like: Tensor, wanted: Sequence[tuple[int, int]]) -> Tensor:
    """Return the rows of a divided tensor that this rank wants, from the ranks of its shard group.

    Each rank of the group wants the rows between two numbers. This rank's rows are divided like `like`.
    Collective within the shard group, if a rank wants rows that it does not hold.
    """
    group, held = like.device_mesh.get_group(SHARD), [local_span(like, rank) for rank in range(len(wanted))]
    first = held[group.rank()][0]

    def shared(span: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
        start = min(max(span[0], other[0]), span[1])
        return start, max(start, min(span[1], other[1]))

    spans = [shared(held[group.rank()], span) for span in wanted]
    sent = [rows[start - first:stop - first] for start, stop in spans]
    if all(shared(span, own) == span for span, own in zip(wanted, held)):
        return sent[group.rank()]
    counts = [stop - start for start, stop in (shared(wanted[group.rank()], span) for span in held)]
    received = _exchange([each.to(like.device_mesh.device_type) for each in sent],
                         [torch.Size((count, *rows.shape[1:])) for count in counts], group)
    return torch.cat(received)


def same_on_all(model: nn.Module, tensor: Tensor) -> Tensor:
    """Return rank 0's tensor on every rank of a sharded model, so that all agree. Collective there."""
    if is_sharded(model):
        with waiting():
            dist.broadcast(tensor, src=0)
    return tensor


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by name; those of a sharded model are divided again after an evaluation."""
    for module in filter(is_sharded, model.modules()):
        module.reshard()
    return dict(model.named_parameters())


# ---------------------------------------------------------------------------------- divided work


@collective
def compute_in_turns(shapes: Sequence[torch.Size], stack: Callable[[int], Tensor],
                     compute: Callable[[Tensor], Tensor], like: Tensor, dtype: torch.dtype,
                     ranks: Ranks) -> Iterator[Tensor]:
    """Yield compute(batch) for each batch of matrices; rank r of N computes batches r, r + N, ...

    Ranks with full matrices broadcast the results. The ranks of a shard group send their rows of a batch to
    the rank that computes it, and get their rows of the result back.

    Args:
        shapes: shape (P, R, C) of each batch of P full matrices.
        stack: returns the batch with this index on the ranks' device, (P, local rows, C), in `dtype`.
        compute: a function that keeps shape and dtype.
        like: one of the parameters; either all or none are divided, over the same ranks.
    """
    in_rows = is_divided(like) and like.device_mesh[SHARD].size() > 1
    group = like.device_mesh.get_group(SHARD) if in_rows else None
    rank, size = (group.rank(), group.size()) if in_rows else (ranks.rank, ranks.world_size)
    for first in range(0, len(shapes), size):
        turn, mine = range(first, min(first + size, len(shapes))), first + rank
        if in_rows:
            yield from _compute_rows(turn, shapes, stack, compute, group)
            continue
        computed = compute(stack(mine)) if mine in turn else None
        for owner, batch in enumerate(turn):
            result = computed
            if batch != mine:
                result = torch.empty(shapes[batch], dtype=dtype, device=ranks.device)
            if size > 1:
                result = result.contiguous()
                with waiting():
                    dist.broadcast(result, src=owner)
            yield result


def _compute_rows(turn: range, shapes: Sequence[torch.Size], stack: Callable[[int], Tensor],
                  compute: Callable[[Tensor], Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Return this rank's rows of compute(batch), for at most as many batches as the group has ranks."""
    rows, shapes_by_rank = [stack(batch) for batch in turn], []
    local_shapes, results = [each.shape for each in rows], [rows[0][:0]]
    if group.rank() < len(turn):
        shape = shapes[turn[group.rank()]]
        height = -(-shape[1] // group.size())  # rows per rank; the last ranks may have fewer or none
        shapes_by_rank = [each.shape for each in torch.empty(shape, device="meta").split(height, dim=1)]
    rows = _exchange(rows, shapes_by_rank, group)
    if shapes_by_rank:
        results = compute(torch.cat(rows, dim=1)).split(height, dim=1)
    return _exchange(results, local_shapes, group)


def _exchange(sent: Sequence[Tensor], shapes: Sequence[torch.Size], group: dist.ProcessGroup) -> list[Tensor]:
    """Send tensor r to rank r; return the tensors from all ranks, in these shapes. The last may send none."""
    counts, numels = [each.numel() for each in sent], [shape.numel() for shape in shapes]
    flat = torch.cat([each.flatten() for each in sent])
    received = flat.new_empty(sum(numels))
    with waiting():
        dist.all_to_all_single(received, flat, *([*each, *[0] * (group.size() - len(each))]
                                                 for each in (numels, counts)), group=group)
    return [each.view(shape) for each, shape in zip(received.split(numels), shapes)]


# ------------------------------------------------------------------------------------- gradients


def total_norm(tensors: Iterable[Tensor], norms: Sequence[Tensor] = ()) -> Tensor:
    """Return the global norm of the tensors, in float32. Collective within a shard group if some are divided.

    `norms` are those of the tensors' local rows, if they are known.
    """
    tensors = [*tensors]
    norms = [*norms] or [*torch._foreach_norm([*map(local_rows, tensors)], 2, torch.float32)]
    if (mesh := next((tensor.device_mesh for tensor in tensors if is_divided(tensor)), None)) is None:
        return torch.linalg.vector_norm(torch.stack(norms))
    # Building a tensor from a Python list would make the host wait for the device.
    divided = [index for index, tensor in enumerate(tensors) if is_divided(tensor)]
    sharded = torch.stack([norms[index] for index in divided]).to(mesh.device_type)
    if mesh[SHARD].size() > 1:
        squares = sharded.square()
        with waiting():
            dist.all_reduce(squares, group=mesh.get_group(SHARD))
        sharded = squares.sqrt()
    for index, norm in zip(divided, sharded.unbind()):  # in the order of the tensors, for the sum's bits
        norms[index] = norm
    return torch.linalg.vector_norm(torch.stack(norms))


@collective
def add_shards(values: Sequence[Tensor], like: Sequence[Tensor]) -> Tensor:
    """Return scalars, one for each parameter, summed over the ranks that divide it, on the ranks' device."""
    mesh = next((parameter.device_mesh for parameter in like if is_divided(parameter)), None)
    if mesh is None:
        return torch.stack([*values])
    group = mesh.get_group(SHARD)
    # Each rank of the group has a full vector; it counts on the first.
    counted = torch.stack([value.to(mesh.device_type) * (is_divided(parameter) or group.rank() == 0)
                           for value, parameter in zip(values, like)])
    with waiting():
        dist.all_reduce(counted, group=group)
    return counted
