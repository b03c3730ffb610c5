"""Data: users' folders, arrays and tables, data in memory, data sets by name; decoded once and cached."""

from fedshift.data.check import DataReport, DomainReport, Duplicate, check_data
from fedshift.data.domain import VOID, Dataset, DataSource, Domain, Skipped, Split, Task
from fedshift.data.formats.base import Problem, Progress
from fedshift.data.formats.in_memory import SiteData
from fedshift.data.memory import dataset_from
from fedshift.data.registry import DatasetInfo, list_datasets, open_dataset, register_dataset

__all__ = [
    "VOID",
    "DataReport",
    "DataSource",
    "Dataset",
    "DatasetInfo",
    "Domain",
    "DomainReport",
    "Duplicate",
    "Problem",
    "Progress",
    "SiteData",
    "Skipped",
    "Split",
    "Task",
    "check_data",
    "dataset_from",
    "list_datasets",
    "open_dataset",
    "register_dataset",
]
