"""Small working projects to begin from, a folder each; see client/templates/project.py."""
