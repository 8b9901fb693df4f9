"""Thin adapters to training frameworks. Each is imported by who uses that framework, and by nothing else."""
