"""What must hold in every world, and the shortest run that breaks it."""
