"""The scenario file, from its text to frozen records."""
