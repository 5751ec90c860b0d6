"""Functions of token batches."""
