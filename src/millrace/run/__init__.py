"""What a training run is: its configuration, the plan made of it, and its datasets."""

from millrace.order.phases import Phase
from millrace.run.arguments import config_from, read_arguments
from millrace.run.build import Datasets, build_datasets
from millrace.run.config import DatasetConfig
from millrace.run.instant_config import InstantConfig, InstantSource

__all__ = [
    "DatasetConfig",
    "Datasets",
    "InstantConfig",
    "InstantSource",
    "Phase",
    "build_datasets",
    "config_from",
    "read_arguments",
]
