"""Which sample numbers a data-parallel rank takes at each step.

All answers of a sampler are pure functions of `consumed_samples`, the number of samples that all
ranks have consumed before the step.
"""

from millrace.sampling.protocols import Sampler as Sampler
from millrace.sampling.samplers import CyclicSampler as CyclicSampler
from millrace.sampling.samplers import FullValidationSampler as FullValidationSampler
from millrace.sampling.samplers import GlobalBatchSampler as GlobalBatchSampler
from millrace.sampling.samplers import SequentialSampler as SequentialSampler
from millrace.sampling.schedules import BatchSizeSchedule as BatchSizeSchedule
from millrace.sampling.schedules import RampUp as RampUp
