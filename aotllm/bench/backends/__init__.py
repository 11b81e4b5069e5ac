"""The protocols that a load generator speaks."""
