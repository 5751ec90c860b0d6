"""Raw rows: training without a preprocessing step.

`open_rows` gives rows by number, `TextDataset` makes samples of them, tokenised when they are asked
for or once for all, and `StreamDataset` makes samples of rows that can only be read in turn.
"""

from millrace.encoding.row_encoders import EncodedRows, RowEncoder, TextRows
from millrace.online.numbered_rows import Rows, open_rows
from millrace.online.stream_dataset import StreamDataset
from millrace.online.text_dataset import TextDataset

__all__ = [
    "EncodedRows",
    "RowEncoder",
    "Rows",
    "StreamDataset",
    "TextDataset",
    "TextRows",
    "open_rows",
]
