"""Llama decode on a CPU straight from GGUF blocks: the worked example of a lowlat kernel library."""
