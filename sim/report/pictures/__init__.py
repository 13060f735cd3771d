"""The pictures of the report as lists of shapes, and their colours."""
