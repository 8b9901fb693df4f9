"""Formats of files: functions that take a binary file object and yield the records in it."""
