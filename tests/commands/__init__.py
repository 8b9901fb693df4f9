"""The commands that plan a loader without starting ranks; ``report`` has those that read traces."""
