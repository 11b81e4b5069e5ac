"""Load generators and their measures."""
