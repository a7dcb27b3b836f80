"""The noise of :mod:`harness.oracles.rounding`: random errors of all samples.

They are drawn once and cut to the shapes of tensors.
"""

from __future__ import annotations

from functools import lru_cache

import torch

_LENGTH = 1 << 13  # errors of each sample


@lru_cache(maxsize=8)
def noise_of(samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Draw the noise of all samples.

    Returns errors, uniform from -1 to 1, as [1 + samples, length]; which constants are rounded to the dtype, as bool
    [1 + samples, 61]; and places in the errors to start at.  The first sample has no errors and no rounded constants.
    In every second sample, all constants are rounded.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(samples + 1, _LENGTH, generator=generator, dtype=torch.float64) * 2 - 1
    noise[0] = 0
    rounded = torch.rand(samples + 1, 61, generator=generator) < 0.5
    rounded[0] = False
    rounded[1::2] = True
    return noise, rounded, torch.randint(0, _LENGTH // 2, (4093,), generator=generator).tolist()


def cut_out(noise: torch.Tensor, start: int, shape: torch.Size) -> torch.Tensor:
    """Cut errors of a shape, [..., *shape], out of the noise, [..., length], which is repeated if it is too short."""
    count = shape.numel()
    if count > _LENGTH // 2:
        noise, start = noise.repeat(*[1] * (noise.dim() - 1), -(-count // _LENGTH)), 0
    return noise[..., start : start + count].view(*noise.shape[:-1], *shape)


@lru_cache(maxsize=4096)
def cut_before(samples: int, seed: int, at: int, shape: torch.Size) -> torch.Tensor:
    """Return the errors of all samples at one place of a run: [1 + samples, *shape], a view of the noise.

    Errors that are too large to be kept have the shape [1 + samples, 0].
    """
    noise, _, starts = noise_of(samples, seed)
    return noise[:, :0] if shape.numel() > _LENGTH // 2 else cut_out(noise, starts[at % len(starts)], shape)
