"""What a batch is: its nesting and leaves, its schema, and the values of several replicas."""
