"""What a training run is: its configuration, the plan made of it, and its datasets."""

from millrace.run.arguments import config_from, read_arguments
from millrace.run.build import Datasets, build_datasets
from millrace.run.config import DatasetConfig
from millrace.run.instant_config import InstantConfig, InstantPhase, InstantSource

__all__ = [
    "DatasetConfig",
    "Datasets",
    "InstantConfig",
    "InstantPhase",
    "InstantSource",
    "build_datasets",
    "config_from",
    "read_arguments",
]
