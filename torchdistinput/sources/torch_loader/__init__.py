"""Running a torch ``DataLoader``: its settings, its loader workers, and their end."""
