"""From the data that a user gives to the pieces of each replica: one folder for each kind of data."""
