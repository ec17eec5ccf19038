"""python -m leyline.proof.llamacpp GGUF PORT REUSE CONTEXT THREADS

llama.cpp's HTTP server, from the package xllamacpp, with `cache-reuse` REUSE and one slot of
CONTEXT tokens.
"""

from __future__ import annotations

import sys
import time
from typing import Any


def parameters(gguf: str, port: int, reuse: int, context: int, threads: int) -> Any:
    """What the server is started with. Prompts that it has seen are not kept in host memory: a
    request starts from what its slot holds, or from nothing."""
    import xllamacpp  # type: ignore[import-not-found]

    given = xllamacpp.CommonParams()
    given.model.path = gguf
    given.port = port
    given.n_ctx, given.n_parallel = context, 1
    given.n_cache_reuse = reuse
    given.cache_ram_mib = given.n_ctx_checkpoints = 0
    given.n_gpu_layers = 0
    given.cpuparams.n_threads = given.cpuparams_batch.n_threads = threads
    given.warmup = True
    return given


def main(args: list[str]) -> None:
    import xllamacpp  # type: ignore[import-not-found]

    gguf, port, reuse, context, threads = args
    server = xllamacpp.Server(parameters(gguf, int(port), int(reuse), int(context), int(threads)))
    print(server.listening_address, flush=True)
    while True:  # until it is ended from outside
        time.sleep(3600)


if __name__ == "__main__":
    if len(sys.argv) != 6:
        sys.exit(str(__doc__).strip())
    main(sys.argv[1:])
