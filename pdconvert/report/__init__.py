"""What a person reads of a build."""
