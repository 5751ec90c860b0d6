"""Cached arrays of an order: `arrays` has millrace's sets, `megatron` Megatron-LM's files."""
