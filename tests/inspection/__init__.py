"""What a loader tells of itself before it reads."""
