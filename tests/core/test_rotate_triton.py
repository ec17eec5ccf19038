"""I2 and I3 for the CUDA kernel, run by Triton's interpreter where no GPU is there.

The interpreter is chosen when Triton is imported, so these tests run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")


@pytest.mark.parametrize("interleaved", ["interleaved", "halves"])
def test_kernel(interleaved: str) -> None:
    """I2, I3: in place, moved, overlapping and plain copies, in every dtype."""
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, __file__, interleaved],
        env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().endswith("all right")


def _main(interleaved: bool) -> None:
    from rotation_bounds import DTYPES, fresh_generator, spec_of
    from test_rotate import _bits, _check

    from leyline.rotate_triton import turn_rows

    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = fresh_generator()
    for dtype in DTYPES:
        for columns, width, start in ((64, 64, 0), (80, 32, 0), (96, 64, 32), (21, 8, 5)):
            spec = spec_of(width, interleaved)
            planes = torch.randn(2, 50, 3, columns, generator=generator).to(dtype)
            planes[:, :, :, ::5] *= -0.0
            src = torch.randperm(50, generator=generator)[:23]
            near = torch.arange(20, 43)
            deltas = torch.randint(-2, 3, (23,), generator=generator) * 700
            for rows, to in (
                (src, src),  # in place
                (src, torch.randperm(50, generator=generator)[:23]),  # some overlap
                (near, near - 7),  # neighbours, overlapping
                (torch.arange(0, 23), torch.arange(23, 46)),  # apart
            ):
                turned = planes.clone().to(device)
                old = rows.to(device)
                new = old if to is rows else to.to(device)
                turn_rows(turned, old, new, deltas, spec, start)
                after = turned.cpu()
                _check(planes[:, rows], after[:, to], deltas, spec, start)
                stayed = deltas == 0
                assert torch.equal(_bits(after[:, to[stayed]]), _bits(planes[:, rows[stayed]]))
                others = torch.ones(50, dtype=torch.bool)
                others[to] = False
                assert torch.equal(_bits(after[:, others]), _bits(planes[:, others]))
                if to is not rows:
                    copied = planes.clone().to(device)
                    turn_rows(copied, old, new, torch.zeros_like(deltas), None, 0)
                    assert torch.equal(_bits(copied.cpu()[:, to]), _bits(planes[:, rows]))
    print("all right")


if __name__ == "__main__":
    _main(sys.argv[1] == "interleaved")
