"""Every encoding that kernels may be asked for, by name, pairs of them, and planes written by a backend."""

from dataclasses import replace

import torch

from crossgrain import COLUMNWISE, ROWWISE
from crossgrain.formats import get_format, nvfp4_format
from crossgrain.formats.encoding import Encoding
from crossgrain.kernels import GroupedTarget, Target
from crossgrain.planes import empty_plane, shape_problem
from crossgrain.planes.groups import empty_groups

from .quantizers import QUANTIZERS

NVFP4_2D_256 = nvfp4_format(two_d=True, scale_bound=256)
ENCODINGS = {
    **{name: quantizer().encoding for name, quantizer in QUANTIZERS.items() if "identity" not in name},
    "mxfp6_e2m3_sr": lambda direction: Encoding(get_format("mxfp6_e2m3"), stochastic=True),
    "nvfp4_2d_sr": lambda direction: Encoding(nvfp4_format(two_d=True), stochastic=True),
    "nvfp4_row_scaled_sr": lambda direction: Encoding(nvfp4_format(row_scaled=True), stochastic=True),
    "nvfp4_row_scaled_4over6": lambda direction: Encoding(nvfp4_format(row_scaled=True), four_over_six="MAE"),
    "nvfp4_4over6_448": lambda direction: Encoding(nvfp4_format(), four_over_six="MAE"),
    "nvfp4_4over6_448_mse": lambda direction: Encoding(nvfp4_format(), four_over_six="MSE"),
    "nvfp4_2d_4over6_mse": lambda direction: Encoding(NVFP4_2D_256, four_over_six="MSE"),
    "nvfp4_2d_4over6_448": lambda direction: Encoding(nvfp4_format(two_d=True), four_over_six="MAE"),
}
NAMES = list(ENCODINGS)
DIRECTIONS = {"rowwise": (ROWWISE,), "columnwise": (COLUMNWISE,), "both": (ROWWISE, COLUMNWISE)}
HYBRIDS = {
    "mxfp8 + nvfp4": ("mxfp8", "nvfp4"),
    "mxfp8 + nvfp4_rht": ("mxfp8", "nvfp4_rht"),
    "mxfp8 + mxfp8_e5m2": ("mxfp8", "mxfp8_e5m2"),
    "fp8 + nvfp4": ("fp8", "nvfp4"),
    "fp8 + nvfp4_rht": ("fp8", "nvfp4_rht"),
    "nvfp4 + mxfp8": ("nvfp4", "mxfp8"),
    "nvfp4_rht_sr + mxfp8": ("nvfp4_rht_sr", "mxfp8"),
    "nvfp4_row_scaled + mxfp8_e5m2": ("nvfp4_row_scaled", "mxfp8_e5m2"),
    "mxfp4_sr + mxfp8": ("mxfp4_sr", "mxfp8"),
    "mxfp6_e3m2 + nvfp4_rht_sr": ("mxfp6_e3m2", "nvfp4_rht_sr"),
    "nvfp4_rht_sr twice": ("nvfp4_rht_sr", "nvfp4_rht_sr"),
    "fp8_block + mxfp4": ("fp8_block", "mxfp4"),
    "mxfp8 + nvfp4_4over6_448": ("mxfp8", "nvfp4_4over6_448"),
    "nvfp4_row_scaled + nvfp4_row_scaled": ("nvfp4_row_scaled", "nvfp4_row_scaled"),
    "nvfp4_2d_sr + nvfp4_2d_sr": ("nvfp4_2d_sr", "nvfp4_2d_sr"),
}
SEED = 0x1234_5678_9ABC_DEF0


def encodings_of(name, directions):
    return [(direction, ENCODINGS[name](direction)) for direction in directions]


def pair_of(name):
    """The encodings of an entry of `HYBRIDS`."""
    row, column = HYBRIDS[name]
    return encodings_of(row, (ROWWISE,)) + encodings_of(column, (COLUMNWISE,))


def that_fit(encodings, shape):
    """Those of the encodings that a tensor of this shape can have."""
    return [(way, encoding) for way, encoding in encodings if shape_problem(encoding.format, way, shape) is None]


def encoded(backend, x, encodings):
    """Planes written by a backend; what it should not touch is filled with a pattern first."""
    targets = []
    for direction, encoding in encodings:
        plane = empty_plane(encoding.format, direction, x.shape, device=x.device)
        for buffer in plane.buffers():
            buffer.view(torch.uint8).fill_(0xA5)
        targets.append(Target(plane, encoding))
    targets = [replace(target, amax=amax) for target, amax in zip(targets, backend.measure(x, targets), strict=True)]
    backend.encode(x, targets, SEED)
    return [target.plane for target in targets]


def encoded_groups(backend, x, heights, encodings):
    """The planes of groups of rows, written by a backend, as `encoded` does it."""
    targets = []
    for direction, encoding in encodings:
        planes = empty_groups(encoding.format, direction, heights, x.shape[1], device=x.device)
        for buffer in (planes.data, planes.scale, planes.amax):
            if buffer is not None:
                buffer.view(torch.uint8).fill_(0xA5)
        targets.append(GroupedTarget(planes, encoding))
    needy = [target for target in targets if target.needs_amax]
    amaxes = iter(backend.measure_groups(x, needy) if needy else ())
    targets = [target.with_amax(next(amaxes)) if target.needs_amax else target for target in targets]
    backend.encode_groups(x, targets, [SEED + group for group in range(len(heights))])
    return [plane for target in targets for plane in target.planes.planes]
