"""`lowlat serve` over the simulated engine: a quick server for tools that want a process. Prints its address."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("server", "engine")]

from faults_kit import PROGRAM  # noqa: E402
from server_kit import byte_text_model  # noqa: E402

from lowlat.engine.client import EngineClient  # noqa: E402
from lowlat.engine.config import EngineConfig  # noqa: E402
from lowlat.server.run import serve  # noqa: E402
from lowlat.server.settings import ServerSettings  # noqa: E402

if __name__ == "__main__":
    # The questions of /v1/rerank and /v1/decisions take more than a hundred tokens of a byte each.
    os.environ.setdefault("FAKE_ENGINE", '{"pages": 400, "max_context": 512}')
    config = EngineConfig(model="fake-model")
    sys.exit(
        serve(
            config,
            ServerSettings(port=0, log_format="json"),
            engine=EngineClient(config, program=PROGRAM),
            load_text=partial(byte_text_model, words=("Yes", "No")),
            on_ready=lambda ready, address: print(address, flush=True),
        )
    )
