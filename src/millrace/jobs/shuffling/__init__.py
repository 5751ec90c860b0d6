"""The global shuffle: the sequences or documents of many domains, permuted and written as shards.

`arguments` checks what the caller asks for. `inputs`, `sequences` and `documents` number the items
of the input. `permutations` gives each item its place, and `distribution` checks the result. `plan`
chooses how the items move; `tasks` is what a worker does, `memory` moves them in one process, and
`movement` runs either. `publish` gives the files their names, and `job` is the whole.
"""

from millrace.jobs.shuffling.inputs import read_input_list
from millrace.jobs.shuffling.job import ShuffleResult, shuffle

__all__ = ["ShuffleResult", "read_input_list", "shuffle"]
