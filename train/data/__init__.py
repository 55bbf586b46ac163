"""Bytes and tokens in: sources, tokenizers, tokens on disk, packing, streams that are computed."""
