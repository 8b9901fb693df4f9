"""From what the user gave to rows: one file for each kind of data."""
