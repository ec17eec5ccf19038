"""python -m leyline.proof.embedded MODEL PORT MAX_TOKENS

The embedded engine behind its HTTP server: `leyline serve` without what that needs to talk to
people, so that it runs wherever SGLang does.
"""

from __future__ import annotations

import sys

MEMORY_GIB = 2.0


def main(args: list[str]) -> None:
    from leyline.engine.engine import Config, Engine
    from leyline.server.run import serve

    path, port, longest = args
    config = Config(memory_gib=MEMORY_GIB, max_tokens=int(longest))
    engine = Engine.load(path, config=config, name="model")
    serve(engine, "127.0.0.1", int(port), log_level="warning")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(str(__doc__).strip())
    main(sys.argv[1:])
