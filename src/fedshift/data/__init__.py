"""Data: users' folders, arrays and tables, public data sets by name, built-in ones; decoded once and cached."""

from fedshift.data.check import DataReport, DomainReport, Duplicate, check_data
from fedshift.data.domain import VOID, Dataset, DataSource, Domain, Skipped, Split, Task
from fedshift.data.raw import Problem, Progress
from fedshift.data.registry import DatasetInfo, list_datasets, open_dataset

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
    "Skipped",
    "Split",
    "Task",
    "check_data",
    "list_datasets",
    "open_dataset",
]
