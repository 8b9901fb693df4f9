"""The doors to the outside: process groups, devices, files."""
