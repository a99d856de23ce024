"""`scripts/prefix_sharing.py`: what it says that it asks."""

from importlib import import_module

from outpace.data.workload import read_workload


def test_there_are_as_many_chats_as_the_table_names() -> None:
    """Guards against fewer chats than the table names: slices of the builtin prompts end where these do."""
    script = import_module("scripts.prefix_sharing")
    assert len(read_workload("builtin")) >= script.AT_ONCE
