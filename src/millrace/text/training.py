"""The former place of `train_tokenizer`, which has moved to `millrace.encoding.training`."""

from millrace.text import moved

__getattr__ = moved("train_tokenizer", __name__, "millrace.encoding.training")
