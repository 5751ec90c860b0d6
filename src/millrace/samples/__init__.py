"""Samples: token batches of sample numbers, and the arrays that are made of them."""
