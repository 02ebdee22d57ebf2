"""`lowlat serve` over the scripted engine: the whole process life, without a model."""

import sys

from server_kit import FAKE_PROGRAM, byte_text_model

from lowlat.engine.client import EngineClient
from lowlat.engine.config import EngineConfig
from lowlat.server.run import StartError, serve
from lowlat.server.settings import ServerSettings

if __name__ == "__main__":
    config = EngineConfig(model="fake-model")
    engine = EngineClient(config, program=FAKE_PROGRAM)
    settings = ServerSettings(port=0, log_format="json")
    try:
        sys.exit(serve(config, settings, engine=engine, load_text=byte_text_model))
    except StartError as error:
        sys.exit(f"error: {error}")
