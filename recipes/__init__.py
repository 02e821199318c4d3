"""The recipes that come with pdconvert, as package data."""
