"""Checksums that tell whether weights are the same, down to each entry."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import accumulate, chain, pairwise

import torch
from torch import Tensor, nn

from millrace.worker.errors import WeightsChanged
from millrace.worker.linear.codes import CodedWeight

_PIECE_BYTES = 1 << 18
"""What has one sum. It stays in the cache of a core, and torch does not divide the work on one piece."""
_GPU_PIECES, _MIN_THREADS = 64, 5
"""Pieces that a GPU sums at a time; and from how many threads on a CPU sums one in each of them. These wait for each other
after each operation, which takes longer than it saves where few cores have other work too."""
_FACTOR = 0x1E3779B97F4A7C15


def checksums(model: nn.Module) -> dict[str, int]:
    """Return the checksum of each parameter and buffer, by name."""
    return _checksums(dict(chain(model.named_parameters(), model.named_buffers())))


def check_unchanged(model: nn.Module, before: dict[str, int]) -> None:
    """Raise `WeightsChanged` unless the model's tensors have the checksums `before`."""
    now = checksums(model)
    changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if changed:
        raise WeightsChanged(
            f"{len(changed)} of {len(before)} tensors are not what they were before the sleep, first of all {changed[0]}: "
            "restart the engine, or let LLM.reload_weights read other weights"
        )


def weights_checksum(model: nn.Module) -> int:
    """Return one checksum of what was read from the model's files. Hosts may round computed buffers differently."""
    # A tensor of two names counts once: the state has one object for it.
    state = {id(tensor): (name, tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    tensors = dict(chain.from_iterable(_stored(name, tensor) for name, tensor in state.values()))
    return zlib.crc32(repr(sorted(_checksums(tensors).items())).encode())


def _stored(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that hold a parameter: several of a weight that is codes."""
    if not isinstance(tensor, CodedWeight):
        yield name, tensor
        return
    for field, part in tensor.coded._asdict().items():
        if part is not None:
            yield f"{name}.{field}", part


def _checksums(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Return the checksum of each tensor. A GPU is waited for once."""
    sums = [_sums(tensor) for tensor in tensors.values()]
    if not sums:
        return {}
    numbers = torch.cat([each.to(sums[0].device) for each in sums]).tolist()
    parts = pairwise(accumulate(map(len, sums), initial=0))
    return {name: zlib.crc32(repr(numbers[slice(*part)]).encode()) for name, part in zip(tensors, parts, strict=True)}


@torch.inference_mode()
def _sums(tensor: Tensor) -> Tensor:  # [P] int64, of P pieces
    """Return a sum for each piece of the tensor's memory, of words of 64 bits with a factor for each place.

    A changed entry always changes the sum of its piece, since the factors are odd. Changes of several entries cancel each
    other with a chance of about 2^-32."""
    memory = tensor.detach().reshape(-1).view(torch.uint8)
    piece_bytes = min(_PIECE_BYTES, max(8, len(memory) + -len(memory) % 8))
    factors = torch.arange(piece_bytes // 8, device=memory.device).mul_(_FACTOR)
    factors.bitwise_xor_(factors >> 32).bitwise_or_(1)
    num_threads = torch.get_num_threads()
    num_pieces = _GPU_PIECES if memory.is_cuda else num_threads if num_threads >= _MIN_THREADS else 1
    sums = []
    for part in torch.split(memory, num_pieces * piece_bytes):
        if part.storage_offset() % 8 or len(part) % piece_bytes:
            part = torch.cat([part, part.new_zeros(-len(part) % piece_bytes)])
        words = part.view(torch.int64).view(-1, len(factors))
        # With the upper half added to the lower one, changes of the highest bits do not cancel each other either.
        sums.append((words >> 32).add_(words).mul_(factors).sum(dim=1))
    return torch.cat(sums)
