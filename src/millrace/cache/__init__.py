"""Arrays of an order in a folder.

`arrays` keeps millrace's own sets, `megatron` reads and writes Megatron-LM's cache files.
"""
