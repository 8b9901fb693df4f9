"""Data in files: which files, who reads them in which order, their records, and where the reading stands."""
