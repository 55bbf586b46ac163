"""Input data: sources, tokenizers, tokens on disk, packing, and computed streams."""
