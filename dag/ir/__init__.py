"""The graph itself: operators and their allow-list, random numbers, starting weights as recipes,
validation, and the way to the wire and back."""
